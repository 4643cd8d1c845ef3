"""Run a network on one of the user's batches, in eval mode and without compiled code.

A batch of sequences may hold an `attention_mask` of (samples, positions). Padded positions are no
data: they count neither in moments nor in distances. The masks of the batch that is running are
known here, so that hooks deep inside the network can ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.memory import Shelved
from lobs.calibration.batches import Batches, fitting, remedy_for, user_code, written
from lobs.calibration.reading import advice, as_arguments
from lobs.errors import CalibrationError
from lobs.layers import Layer
from lobs.layers.discovery import open_questions
from lobs.layers.graph import device_of
from lobs.layers.linear import LinearLayer
from lobs.layers.untouched import buffers_kept, same_noise, seed_of, untouched
from lobs.layers.uses import learnt, teach, watched

Masks: TypeAlias = tuple[Tensor, ...]  # of (samples, positions), True where a position is data

_NAMES = ("attention_mask", "decoder_attention_mask")
_current: ContextVar[Masks] = ContextVar("lobs_padding", default=())


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on one batch and return its output.

    A batch is a tensor, a mapping of keyword arguments, or a tuple of inputs with labels behind
    them.
    """
    if isinstance(batch, tuple | list) and not batch:
        raise CalibrationError(
            "a calibration batch is an empty tuple; its first item should be the input."
        )
    batch = batch if isinstance(batch, Tensor) else as_arguments(model, batch)
    if isinstance(batch, Mapping):
        with (
            user_code(
                f"running the network on a batch of {', '.join(map(str, batch))}",
                partial(_remedy, model, batch),
            ),
            padded(masks_of(batch)),
        ):
            return _run(model, batch)
    if not isinstance(batch, Tensor):
        raise CalibrationError(_not_a_tensor(batch, _kind(model)))
    with user_code(
        f"running the network on a batch of shape {tuple(batch.shape)}",
        partial(_remedy, model, batch),
    ):
        return _run(model, batch)


def fitted(
    model: nn.Module, batches: Iterable[Any], *, again: bool = True, name: str = "batches"
) -> Batches:
    """Return batches in the form that a network takes: tensors, or mappings of its arguments.

    Args:
        model: the network.
        batches: batches as `prune` takes them.
        again: read a generator into memory, because the batches are needed more than once.
        name: the argument's name, for messages.
    """

    def run(batch: Any) -> None:
        with evaluating(model), buffers_kept(model):
            _run(model, batch)

    return fitting(model, batches, run, again=again, name=name)


def _run(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> Any:
    """Run a network on a copy of a batch: in-place steps would change it for the next pass.

    In eval mode the network is left as it was, and draws the same noise for the same batch.
    """
    device = device_of(model)
    given = _copied(batch, device)
    if model.training:
        return model(**given) if isinstance(given, Mapping) else model(given)
    with same_noise(seed_of(batch), device), untouched(model):
        return model(**given) if isinstance(given, Mapping) else model(given)


def _copied(value: Any, device: torch.device) -> Any:
    """Return a copy of all tensors on a device, also inside lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(part, device) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(part, device) for part in value)
    return value


def _remedy(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> str:
    """Return the code that mends a failing batch, found by trying.

    Nothing is tried in training mode, nor while other processes wait.
    """
    if process_group().size > 1 or any(module.training for module in model.modules()):
        return ""
    return advice(model, batch) or remedy_for(partial(_run, model), batch, _kind(model))


def _kind(model: nn.Module) -> torch.dtype | None:
    """Return the type of a network's first floating-point weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _not_a_tensor(batch: Any, kind: torch.dtype | None) -> str:
    what, code = f"cannot feed a batch of type {type(batch).__name__}", written(batch, kind)
    if code != "x":
        return (
            f"{what} ({batch.dtype} of shape {batch.shape}) to a network of {kind}: write {code}."
        )
    return (
        f"{what}: give a tensor, a tuple whose first item is one, or a mapping of keyword "
        "arguments."
    )


def main_output(out: Any) -> Tensor | None:
    """Return all floating-point tensors of an output as one tensor; None where there is none.

    Hugging Face outputs also carry caches and hidden states. Of those only `logits` or
    `last_hidden_state` counts.
    """
    if isinstance(out, Mapping) and hasattr(out, "to_tuple"):
        out = next((out[key] for key in ("logits", "last_hidden_state") if key in out), out)
    found = list(_floating(out))
    if len(found) <= 1:
        return found[0] if found else None
    return torch.cat([t.flatten() for t in found])


def _floating(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield from [out] if out.is_floating_point() else []
    else:
        for part in parts_of(out):
            yield from _floating(part)


def parts_of(out: Any) -> Iterable[Any]:
    """Return what an output holds: the items of a container, or the fields of a dataclass."""
    if isinstance(out, Mapping):
        return out.values()
    if isinstance(out, tuple | list):
        return out
    if isinstance(out, SimpleNamespace) or (is_dataclass(out) and not isinstance(out, type)):
        return vars(out).values()
    return ()


def plain_input(batch: Any) -> Tensor | None:
    """Return a batch's input if it is one tensor that can be split by sample; else None."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return x if isinstance(x, Tensor) and x.dim() > 1 else None


def batch_size(batch: Any) -> int:
    """Return the number of samples: the first dimension of a batch's first tensor.

    A list that is itself an argument holds one sample in each entry.
    """
    if isinstance(batch, Mapping):
        values: Iterable[Any] = batch.values()
    else:
        values = batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor):
            return 1 if value.dim() == 0 else len(value)
        if isinstance(batch, Mapping) and isinstance(value, list) and value:
            return len(value)
        if isinstance(value, Mapping):
            return batch_size(value)
    return 1


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients; restore every module's own mode afterwards."""
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
    """Run compiled networks eagerly: compiled code ignores hooks placed after compilation."""
    if not any(
        "_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()
    ):
        yield  # without importing the compiler, which takes seconds
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def length(batches: Iterable[Any]) -> int | None:
    """Return the number of batches; None where it is not known beforehand."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def masks_of(batch: Any) -> Masks:
    """Return the masks of a batch, one for each shape; none where nothing is padded.

    The two sides of an encoder-decoder may have one shape. A position then is data if it is in
    either of them.
    """
    if not isinstance(batch, Mapping):
        return ()
    found: dict[tuple[int, ...], Tensor] = {}
    given = [batch[name] for name in _NAMES if name in batch]
    ids = batch.get("decoder_input_ids")
    if isinstance(ids, Tensor) and "decoder_attention_mask" not in batch:
        given.append(torch.ones_like(ids))
    for mask in given:
        if isinstance(mask, Tensor) and mask.dim() == 2:
            shape = tuple(mask.shape)
            found[shape] = found[shape] | (mask != 0) if shape in found else mask != 0
    return tuple(mask for mask in found.values() if not bool(mask.all()))


def rows_of_masks(masks: Masks, rows: slice) -> Masks:
    """Return the masks of some samples."""
    return tuple(mask[rows] for mask in masks)


@contextmanager
def padded(masks: Masks) -> Iterator[None]:
    """Let these be the masks of the batch that runs inside the block."""
    token = _current.set(masks)
    try:
        yield
    finally:
        _current.reset(token)


def positions(x: Tensor | Shelved, masks: Masks | None = None) -> Tensor | None:
    """Return the mask that fits a tensor of (samples, positions, …); None: all are data."""
    for mask in _current.get() if masks is None else masks:
        if tuple(x.shape[:2]) == tuple(mask.shape):
            return mask.to(x.device) if isinstance(x, Tensor) else mask
    return None


def unpadded(layer: Layer, x: Tensor, rows: slice | None = None) -> Tensor:
    """Return a layer's input without padded positions.

    Args:
        layer: the layer. Only linear layers have features last, so others keep their input.
        x: its input. Networks may flatten samples and positions into one dimension.
        rows: samples to take; all by default.
    """
    taken = x if rows is None else x[rows]
    if not _current.get() or not isinstance(layer, LinearLayer):
        return taken
    if x.dim() > 2 and getattr(layer.module, "batch_first", True):
        mask = positions(x)
        return taken if mask is None else taken[mask if rows is None else mask[rows]]
    flat = next((m.flatten() for m in _current.get() if x.dim() == 2 and m.numel() == len(x)), None)
    return taken if flat is None else taken[(flat if rows is None else flat[rows]).to(x.device)]


def without_padding(out: Tensor) -> Tensor:
    """Return an output of (samples, positions, …) without padded positions."""
    mask = positions(out) if out.dim() > 2 else None
    return out if mask is None else out[mask]


def learn(model: nn.Module, batches: Iterable[Any], *, always: bool = False) -> None:
    """Watch one forward pass where the modules' classes leave open how weights are used.

    Args:
        model: the network.
        batches: the calibration data, of which the first batch is run.
        always: watch even where all classes are known.
    """
    if learnt(model) is not None or not (always or open_questions(model)):
        return
    with process_group().raise_together(), buffers_kept(model), evaluating(model):
        for batch in batches:
            with watched(model):
                call(model, batch)
            break
    found = [known for known in process_group().all_gather(learnt(model)) if known is not None]
    if found:
        teach(model, found[0])
