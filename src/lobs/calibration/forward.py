"""Run a network on one of the user's batches, in eval mode and without compiled code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.batches import remedy_for, user_code, written
from lobs.calibration.padding import masks_of, padded
from lobs.errors import CalibrationError
from lobs.layers.graph import device_of


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on one batch and return its output.

    A batch is a tensor, a tuple whose first item is the input, or a mapping of keyword arguments.
    """
    if isinstance(batch, Mapping):
        with (
            user_code(
                f"running the network on a batch of {', '.join(map(str, batch))}",
                partial(_remedy, model, batch),
            ),
            padded(masks_of(batch)),
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
    """Run a network on a copy of a batch: in-place steps would change it for the next pass."""
    device = device_of(model)
    if isinstance(batch, Tensor):
        return model(batch.to(device, copy=True))
    return model(
        **{k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
    )


def _remedy(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> str:
    """Return the code that mends a failing batch, found by trying.

    Nothing is tried in training mode, nor while other processes wait.
    """
    if process_group().size > 1 or any(module.training for module in model.modules()):
        return ""
    return remedy_for(partial(_run, model), batch, _kind(model))


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
    elif isinstance(out, Mapping | tuple | list):
        for part in out.values() if isinstance(out, Mapping) else out:
            yield from _floating(part)


def plain_input(batch: Any) -> Tensor | None:
    """Return a batch's input if it is one tensor that can be split by sample; else None."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return x if isinstance(x, Tensor) and x.dim() > 1 else None


def batch_size(batch: Any) -> int:
    """Return the number of samples: the first dimension of a batch's first tensor."""
    if isinstance(batch, Mapping):
        values: Iterable[Any] = batch.values()
    else:
        values = batch if isinstance(batch, tuple | list) else [batch]
    first = next((v for v in values if isinstance(v, Tensor)), None)
    return 1 if first is None or first.dim() == 0 else len(first)


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
