"""A pretended device: its tensors hold numbers in main memory, but name another device.

Operations on them compute as on the CPU. Like those of a real device they refuse tensors of the CPU
beside them, except single numbers and indices. They refuse generators of the CPU, and have no
NumPy view. A tensor that is made without `device=` is on the CPU. So whatever forgets the input's
device fails here as it would on a real device.

Importing this registers the device for the whole process, so it is done in a process of its own.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
_aten = torch.ops.aten
# These take tensors of two devices: copies, and indices from the CPU.
_CROSSING = {
    _aten.copy_.default, _aten._to_copy.default, _aten.index.Tensor, _aten.index_put_.default,
    _aten.index_put.default, _aten._index_put_impl_.default,
}  # fmt: skip


class Pretended(torch.Tensor):
    """A tensor that names the pretended device; `raw` has its numbers."""

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )

    def __init__(self, raw):
        self.raw = raw

    def __repr__(self):
        return f"pretended({self.raw!r})"

    # torch makes these in C++, without asking subclasses.
    def tolist(self):
        return self.raw.tolist()

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        made = torch.tensor(data, dtype=self.dtype if dtype is None else dtype)
        place = self.device if device is None else device
        return made.to(place).requires_grad_(requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Let tensors be made on the pretended device, and moved to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


_library = torch.library.Library("aten", "IMPL")


@torch.library.impl(_library, "empty_strided", "PrivateUse1")
def _empty(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Pretended(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl(_library, "_copy_from", "PrivateUse1")
def _copy(source, target, non_blocking=False):
    raw = [t.raw if isinstance(t, Pretended) else t for t in (source, target)]
    return target if raw[1].copy_(raw[0]) is raw[1] else raw[1]


def _run(func, args, kwargs):
    values, _ = tree_flatten((args, kwargs))
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    ours = any(isinstance(t, Pretended) for t in tensors)
    if ours and func not in _CROSSING:
        _check(func, tensors)
    device = kwargs.get("device")
    wrap = ours if device is None else torch.device(device).type == NAME
    if func is _aten.copy_.default:
        wrap = isinstance(args[0], Pretended)
    if wrap:
        _check_generator(func, values)
    if not (ours or wrap):
        return func(*args, **kwargs)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map(lambda v: v.raw if isinstance(v, Pretended) else v, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if not wrap:
        return out.clone() if any(out is v for v in tree_flatten(plain)[0]) else out
    wrapped = tree_map(lambda v: Pretended(v) if isinstance(v, torch.Tensor) else v, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if ours else wrapped


def _check(func, tensors):
    found = [t for t in tensors if not isinstance(t, Pretended) and t.dim() > 0]
    if found:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got one on "
            f"{found[0].device} of shape {tuple(found[0].shape)} and one on {DEVICE}"
        )


def _check_generator(func, values):
    for value in values:
        if isinstance(value, torch.Generator) and value.device.type != NAME:
            raise RuntimeError(
                f"Expected a '{NAME}' device type for generator but found '{value.device}' ({func})"
            )
