"""Collect the moments of every layer's input in one pass over the user's data.

`collect_moments` never changes the model. Hooks are removed and every module's mode is restored,
also when the model raises.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import shown, track
from lobs.calibration.forward import (
    batch_size,
    call,
    evaluating,
    fitted,
    length,
    main_output,
    masks_of,
    unpadded,
)
from lobs.calibration.moments import Moments
from lobs.errors import CalibrationError
from lobs.layers import Layer, find_layers, watching
from lobs.storage.run_store import RunStore


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, Moments]):
    """Hold moments by layer name, in the order in which the layers first ran.

    Attributes:
        moments: the moments of each layer's input.
        samples: number of network inputs.
        example: one input, for shapes; None where the network takes keyword arguments.
        shapes: the different shapes of one input.
        batches: number of batches.
        outputs: number of output elements for each batch of each process.
    """

    moments: Mapping[str, Moments]
    samples: int
    example: Any = field(default=None, repr=False)
    shapes: frozenset[tuple[int, ...]] = frozenset()
    batches: int = 0
    outputs: tuple[Sequence[int], ...] = ((),)

    def drawn_elsewhere(self, rank: int) -> list[int]:
        """Count the output elements of other processes before each batch of one process.

        The processes take turns, one batch at a time.
        """
        skipped, found = 0, []
        for turn in range(max(map(len, self.outputs))):
            for other, sizes in enumerate(self.outputs):
                if other == rank and turn < len(sizes):
                    found.append(skipped)
                    skipped = 0
                elif turn < len(sizes):
                    skipped += sizes[turn]
        return found

    def count(self, name: str) -> int:
        """Return the number of vectors that have reached a layer."""
        return self.moments[name].count + self.moments[name].left_out

    def __getitem__(self, name: str) -> Moments:
        return self.moments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)

    def __len__(self) -> int:
        return len(self.moments)


def collect_moments(
    model: nn.Module,
    batches: Iterable[Any],
    layers: str | Iterable[str] | Sequence[Layer] | None = None,
    *,
    progress: bool = False,
    run_store: RunStore | None = None,
    key: str = "calibration",
    counts_only: bool = False,
    required: bool = True,
    enough: int | None = None,
    every: int = 1,
) -> Calibration:
    """Stream the second moment of every prunable layer's input in one pass over `batches`.

    A layer that no batch reaches, an empty iterable, and NaN or infinite activations are errors.
    Inputs are moved to the device of the model's first parameter.

    Args:
        model: any network; run in eval mode without gradients, left as it was found.
        batches: tensors, tuples whose first item is the input, or mappings of keyword arguments.
        layers: names, globs or `Layer`s; all prunable layers by default.
        progress: draw a bar.
        run_store: where to keep the state of the pass, and to resume it from.
        key: the name of the pass in the run store.
        counts_only: only count inputs; their moments and means stay empty.
        required: refuse data that never reach a layer; else the layer is missing in the result.
        enough: vectors for every column that suffice; of larger images some positions are summed.
        every: run each k-th batch. One between them counts as the last, if it has the same form.
    """
    batches = fitted(model, batches, again=False)
    chosen, run_store = _as_layers(model, layers), run_store or RunStore()
    stored, complete = _resumed(run_store, key, chosen)
    if complete:
        return stored
    state = _State(stored)
    many = -(-(length(batches) or 1) // every)
    observations = (
        layer.on_input(partial(_count, layer, state, counts_only, (enough, many)))
        for layer in chosen
    )
    with (
        process_group().raise_together(),
        shown(progress),
        track("calibrate", length(batches)) as advance,
        watching(observations),
        evaluating(model),
    ):
        for index, batch in enumerate(batches):
            if index < stored.batches:
                continue
            if index % every == 0 or not state.repeated(batch, chosen):
                state.add(index, batch, main_output(call(model, batch)))
            advance(1)
            if run_store.due:
                run_store.write(key, *_packed(state.calibration(), complete=False))
    seen = _joined(state.calibration(), chosen, counts_only)
    _check_reached(seen, chosen if required else ())
    run_store.write(key, *_packed(seen, complete=True))
    return seen


class _State:
    """Hold the state of a pass between two batches."""

    def __init__(self, stored: Calibration) -> None:
        self.moments, self.shapes = dict(stored.moments), set(stored.shapes)
        self.samples, self.example = stored.samples, stored.example
        self.outputs = list(stored.outputs[0])
        self.form: Hashable = None  # of the last batch that was run
        self.each: dict[str, int] = {}  # vectors of the last batch that was run
        self.counts = {n: m.count + m.left_out for n, m in self.moments.items()}  # of all batches

    def repeated(self, batch: Any, layers: Sequence[Layer]) -> bool:
        """Count a batch as the one before it, if it has its form and that one reached all layers.

        Experts get other numbers of tokens in every batch, and so do layers of padded batches.
        """
        form = _form(batch)
        if form is None or form != self.form or masks_of(batch):
            return False
        if any(layer.routed or not self.each.get(layer.name) for layer in layers):
            return False
        for name, vectors in self.each.items():
            self.moments[name].left_out += vectors
        self.outputs.append(self.outputs[-1])
        self._note(batch)
        return True

    def add(self, index: int, batch: Any, out: Tensor | None) -> None:
        """Count a batch that has been run; refuse it if a layer's input was not finite."""
        self.outputs.append(0 if out is None else out.numel())
        bad = [name for name, moments in self.moments.items() if not moments.finite]
        if bad:
            raise CalibrationError(
                f"layer '{bad[0]}': NaN or infinite input in batch {index}, or one whose square "
                "is beyond float64. Check the data and the network on that batch."
            )
        self.form, before = None if masks_of(batch) else _form(batch), self.counts
        self._note(batch)
        self.each = {name: n - before.get(name, 0) for name, n in self.counts.items()}
        sample = _first_sample(batch)
        self.example = sample if self.example is None else self.example
        self.shapes |= set() if sample is None else {tuple(sample.shape)}

    def _note(self, batch: Any) -> None:
        self.samples += batch_size(batch)
        self.counts = {n: m.count + m.left_out for n, m in self.moments.items()}

    def calibration(self) -> Calibration:
        """Return the calibration so far."""
        return Calibration(
            self.moments,
            self.samples,
            self.example,
            frozenset(self.shapes),
            len(self.outputs),
            (self.outputs,),
        )


def _check_reached(seen: Calibration, layers: Sequence[Layer]) -> None:
    """Refuse a calibration without samples, or one that never reached a layer."""
    if seen.samples == 0:
        raise CalibrationError(
            "no calibration samples: the batches were empty. A generator can be used only once."
        )
    missing = [layer.name for layer in layers if layer.name not in seen]
    if missing:
        raise never_reached(missing)


def never_reached(names: Sequence[str]) -> CalibrationError:
    """Return the error for layers whose modules no batch runs."""
    return CalibrationError(
        f"layer '{names[0]}' was never reached by the calibration data ({len(names)} such). Skip "
        f"it: skip={list(names)}, or --skip {names[0]}."
    )


def _joined(seen: Calibration, layers: Sequence[Layer], counts_only: bool) -> Calibration:
    """Add up the calibrations of all processes; a layer need not be reached in each of them."""
    group = process_group()
    if group.size == 1:
        return seen
    gathered = group.all_gather(
        [
            list(seen),
            seen.samples,
            sorted(map(list, seen.shapes)),
            list(seen.outputs[0]),
            seen.batches,
        ]
    )
    moments, by_name = {}, {layer.name: layer for layer in layers}
    for name in dict.fromkeys(name for names, *_ in gathered for name in names):
        layer = by_name[name]
        moments[name] = (
            seen[name]
            if name in seen
            else Moments.of(layer, layer.weight.device, counts_only=counts_only)
        )
        moments[name].join()
    has_example = group.all_gather(seen.example is not None)
    example = None
    if any(has_example):
        own = {} if seen.example is None else {"example": seen.example}
        example = group.broadcast_object(own, by=has_example.index(True))[0]["example"]
    shapes = frozenset(tuple(shape) for _, _, some, _, _ in gathered for shape in some)
    outputs = tuple(tuple(sizes) for *_, sizes, _ in gathered)
    return Calibration(
        moments,
        sum(s for _, s, *_ in gathered),
        example,
        shapes,
        sum(n for *_, n in gathered),
        outputs,
    )


def _packed(seen: Calibration, *, complete: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"{part}:{name}": t for name, m in seen.items() for part, t in m.packed().items()}
    if seen.example is not None:
        tensors["example"] = seen.example
    shapes = sorted(map(list, seen.shapes))
    record = {
        "layers": list(seen),
        "samples": seen.samples,
        "batches": seen.batches,
        "shapes": shapes,
        "complete": complete,
    }
    return tensors, {**record, "outputs": [list(sizes) for sizes in seen.outputs]}


def _resumed(run_store: RunStore, key: str, layers: Sequence[Layer]) -> tuple[Calibration, bool]:
    """Return the state that an earlier pass has stored, and whether that pass was complete."""
    saved = run_store.read(key)
    if saved is None:
        return Calibration({}, 0), False
    moments, by_name = {}, {layer.name: layer for layer in layers}
    for name in saved.record["layers"]:
        parts = {
            part: saved.state_dict[f"{part}:{name}"].clone() for part in ("whole", "sum", "count")
        }
        layer = by_name[name]
        moments[name] = Moments.unpacked(
            parts, bias=layer.bias is not None, device=layer.weight.device
        )
    shapes = frozenset(tuple(shape) for shape in saved.record["shapes"])
    record, example = saved.record, saved.state_dict.get("example")
    seen = Calibration(
        moments, record["samples"], example, shapes, record["batches"], tuple(record["outputs"])
    )
    return seen, record["complete"]


def _count(
    layer: Layer, state: _State, counts_only: bool, sampling: tuple[int | None, int], x: Tensor
) -> None:
    """Add one call's input to the moments of its layer.

    Args:
        layer: the layer.
        state: the pass so far.
        counts_only: only count the input's vectors.
        sampling: vectors for every column that suffice, if any do; and the number of batches.
        x: the input.
    """
    if layer.name not in state.moments:
        state.moments[layer.name] = Moments.of(layer, x.device, counts_only=counts_only)
    moments, x = state.moments[layer.name], unpadded(layer, x.detach())
    if counts_only:
        moments.note(x, layer.vectors(x))
        return
    (enough, many), step, before = sampling, 1, moments.count
    if enough is not None:
        step = layer.spacing(many * layer.vectors(x), enough * layer.columns)
    for piece in layer.sampled(x, step, len(state.outputs)):
        moments.add(piece)
    if step > 1:
        moments.left_out += layer.vectors(x) - (moments.count - before)


def _as_layers(
    model: nn.Module, layers: str | Iterable[str] | Sequence[Layer] | None
) -> list[Layer]:
    if layers is None or isinstance(layers, str):
        return find_layers(model, layers)
    listed = list(layers)
    if listed and all(isinstance(x, Layer) for x in listed):
        return [x for x in listed if isinstance(x, Layer)]
    return find_layers(model, [x for x in listed if isinstance(x, str)])


def _form(batch: Any) -> Hashable:
    """Return the shapes and plain values of a batch; None where it holds NaN or anything else."""
    if isinstance(batch, Tensor):
        finite = bool(torch.isfinite(batch).all())
        return (tuple(batch.shape), batch.dtype) if finite else None
    if isinstance(batch, Mapping):
        batch = tuple((str(name), part) for name, part in batch.items())
    if isinstance(batch, tuple | list):
        parts = tuple(map(_form, batch))
        return None if None in parts else parts
    return (type(batch), batch) if isinstance(batch, str | int | float | bool) else None


def _first_sample(batch: Any) -> Tensor | None:
    """Return one input, for shapes; None where the model takes keyword arguments."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    return (
        batch[:1].detach().clone()
        if isinstance(batch, Tensor) and batch.dim() > 0 and len(batch)
        else None
    )
