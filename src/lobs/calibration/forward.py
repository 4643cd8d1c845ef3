"""A network run on one of the user's batches, in eval mode and as it was written; what a batch holds, what an answer says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.batches import remedy_for, user_code, written
from lobs._system.distributed import process_group
from lobs.errors import CalibrationError


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on one batch: a tensor, a tuple whose first item is the input, or keyword arguments."""
    if isinstance(batch, Mapping):
        with user_code(
            f"running the network on a batch of {', '.join(map(str, batch))}",
            partial(_remedy, model, batch),
        ):
            return _run(model, batch)
    if isinstance(batch, tuple | list):
        if not batch:
            raise CalibrationError(
                "a calibration batch is an empty tuple; its first item should be the input."
            )
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise CalibrationError(_not_a_tensor(batch, _kind(model)))
    with user_code(
        f"running the network on a batch of shape {tuple(batch.shape)}",
        partial(_remedy, model, batch),
    ):
        return _run(model, batch)


def _run(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> Any:
    """The network's answer to a copy of a batch: networks that work in place would spoil it for the next pass."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Tensor):
        return model(batch.to(device, copy=True))
    return model(
        **{k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
    )


def _remedy(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> str:
    """What to write instead of a batch that fails, where the network may be tried: not in training, nor while others wait."""
    if process_group().size > 1 or any(module.training for module in model.modules()):
        return ""
    return remedy_for(partial(_run, model), batch, _kind(model))


def _kind(model: nn.Module) -> torch.dtype | None:
    """The type of a network's first floating-point weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _not_a_tensor(batch: Any, kind: torch.dtype | None) -> str:
    what, code = f"cannot feed a batch of type {type(batch).__name__}", written(batch, kind)
    if code != "x":
        return (
            f"{what} ({batch.dtype} of shape {batch.shape}) to a network of {kind}: write {code}."
        )
    return f"{what}: give a tensor, a tuple whose first item is one, or a mapping of keyword arguments."


def main_output(out: Any) -> Tensor | None:
    """What an answer is about, as one tensor: all its floating-point tensors, joined where there are several.

    Of Hugging Face's answers, which also carry caches and hidden states, only `logits` or
    `last_hidden_state`.
    """
    if isinstance(out, Mapping) and hasattr(out, "to_tuple"):
        out = next((out[key] for key in ("logits", "last_hidden_state") if key in out), out)
    found = list(_floating(out))
    return (
        found[0] if len(found) == 1 else torch.cat([t.flatten() for t in found]) if found else None
    )


def _floating(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield from [out] if out.is_floating_point() else []
    elif isinstance(out, Mapping | tuple | list):
        for part in out.values() if isinstance(out, Mapping) else out:
            yield from _floating(part)


def plain_input(batch: Any) -> Tensor | None:
    """A batch's input where that is one tensor of several dimensions, alone or first in a tuple: such can be cut and joined."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return x if isinstance(x, Tensor) and x.dim() > 1 else None


def batch_size(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor."""
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, tuple | list)
        else [batch]
    )
    first = next((v for v in values if isinstance(v, Tensor)), None)
    return 1 if first is None or first.dim() == 0 else len(first)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _uncompiled(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Let compiled networks run as they were written: compiled code does not look for hooks that came after it."""
    if not any(
        "_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()
    ):
        yield  # importing the compiler takes seconds
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def length(batches: Iterable[Any]) -> int | None:
    """How many batches there are, where that can be known beforehand."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
