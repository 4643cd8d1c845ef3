"""One pass over the user's data, watching what reaches each layer.

`collect` never changes the model: hooks come off and every module's train/eval mode comes back even when the model raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import CalibrationError
from lobs.layers import Handle, Layer, find_layers
from lobs.progress import shown, track
from lobs.statistics import Moments


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, Moments]):
    """Moments by layer name, in the order in which the layers first ran."""

    moments: Mapping[str, Moments]
    samples: int
    example: Any = field(default=None, repr=False)
    shapes: frozenset[tuple[int, ...]] = frozenset()

    def __getitem__(self, name: str) -> Moments:
        return self.moments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)

    def __len__(self) -> int:
        return len(self.moments)


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    layers: str | Iterable[str] | Sequence[Layer] | None = None,
    *,
    progress: bool = False,
) -> Calibration:
    """Stream the second moment of every prunable layer's input in one pass over `batches`.

    Args:
        model: any network; run in eval mode without gradients, left as it was found.
        batches: tensors, tuples whose first item is the input, or mappings of keyword arguments.
        layers: names, globs or `Layer`s; all prunable layers by default.
        progress: draw a bar.

    A layer that no batch reaches, an empty iterable, and NaN or infinite activations are errors that say so. Inputs are
    moved to the device of the model's first parameter.
    """
    if isinstance(batches, Tensor | str | bytes) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}: give a list of batches or a DataLoader; one tensor x is [x]."
        )
    chosen = _as_layers(model, layers)
    moments: dict[str, Moments] = {}
    samples, example, shapes = 0, None, set[tuple[int, ...]]()
    with (
        shown(progress),
        track("calibrate", length(batches)) as advance,
        _watching(chosen, moments),
        evaluating(model),
    ):
        for index, batch in enumerate(batches):
            call(model, batch)
            bad = [name for name, m in moments.items() if not m.finite]
            if bad:
                raise CalibrationError(
                    f"layer '{bad[0]}': NaN or infinite input in batch {index}. Check the data and the network on that batch."
                )
            samples += batch_size(batch)
            sample = _first_sample(batch)
            example = sample if example is None else example
            shapes |= set() if sample is None else {tuple(sample.shape)}
            advance(1)
    if samples == 0:
        raise CalibrationError("no calibration batches: the iterable was empty. A generator can be used only once.")
    missing = [layer.name for layer in chosen if layer.name not in moments]
    if missing:
        raise CalibrationError(
            f"layer '{missing[0]}' was never reached by the calibration data ({len(missing)} such). Skip it: skip={missing}."
        )
    return Calibration(moments, samples, example, frozenset(shapes))


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on one batch: a tensor, a tuple whose first item is the input, or keyword arguments."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Mapping):
        return model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()})
    if isinstance(batch, tuple | list):
        if not batch:
            raise CalibrationError("a calibration batch is an empty tuple; its first item should be the input.")
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise CalibrationError(
            f"cannot feed a batch of type {type(batch).__name__}: give a tensor, a tuple whose first item is one, or a "
            f"mapping of keyword arguments."
        )
    return model(batch.to(device))


def main_output(out: Any) -> Tensor | None:
    """The tensor that an answer is about: itself, `logits` or `last_hidden_state` of a mapping, the first of a tuple."""
    if isinstance(out, Mapping):
        named = [out[key] for key in ("logits", "last_hidden_state") if key in out]
        out = named[0] if named else next(iter(out.values()), None)
    if isinstance(out, tuple | list):
        out = next((x for x in out if isinstance(x, Tensor)), None)
    return out if isinstance(out, Tensor) and out.is_floating_point() else None


def batch_size(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    first = next((v for v in values if isinstance(v, Tensor)), None)
    return 1 if first is None or first.dim() == 0 else len(first)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _watching(layers: Sequence[Layer], moments: dict[str, Moments]) -> Iterator[None]:
    def watch(layer: Layer) -> Handle:
        def count(x: Tensor) -> None:
            if layer.name not in moments:
                moments[layer.name] = Moments(layer.groups, layer.columns, bias=layer.bias is not None, device=x.device)
            for piece in layer.patches(x.detach()):
                moments[layer.name].add(piece)

        return layer.on_input(count)

    handles: list[Handle] = []
    try:
        for layer in layers:
            handles.append(watch(layer))  # noqa: PERF401 - if one fails, those before it must still come off
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_layers(model: nn.Module, layers: str | Iterable[str] | Sequence[Layer] | None) -> list[Layer]:
    if layers is None or isinstance(layers, str):
        return find_layers(model, layers)
    listed = list(layers)
    if listed and all(isinstance(x, Layer) for x in listed):
        return [x for x in listed if isinstance(x, Layer)]
    return find_layers(model, [x for x in listed if isinstance(x, str)])


def length(batches: Iterable[Any]) -> int | None:
    """How many batches there are, where that can be known beforehand."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def _first_sample(batch: Any) -> Tensor | None:
    """One input to learn shapes from; None where the model takes keywords."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    return batch[:1].detach().clone() if isinstance(batch, Tensor) and batch.dim() > 0 and len(batch) else None
