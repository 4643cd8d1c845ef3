"""One pass over the user's data, watching what reaches each layer.

`collect` never changes the model: hooks come off and every module's train/eval mode comes back even
when the model raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lobs.calibration.batches import guarded
from lobs._system.distributed import process_group
from lobs.errors import CalibrationError
from lobs.storage.run_store import RunStore
from lobs.layers import Layer, find_layers, watching
from lobs._system.progress import shown, track
from lobs.calibration.forward import batch_size, call, evaluating, length, main_output
from lobs.calibration.moments import Moments


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, Moments]):
    """Moments by layer name, in the order in which the layers first ran."""

    moments: Mapping[str, Moments]
    samples: int
    example: Any = field(default=None, repr=False)
    shapes: frozenset[tuple[int, ...]] = frozenset()
    batches: int = 0
    outputs: tuple[Sequence[int], ...] = (
        (),
    )  # how many numbers each process's batches made the network give

    def drawn_elsewhere(self, rank: int) -> list[int]:
        """For each batch of one process, how many numbers the others' batches give since its last, all taken in turns."""
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
        """How many vectors have reached a layer."""
        return self.moments[name].count

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
) -> Calibration:
    """Stream the second moment of every prunable layer's input in one pass over `batches`.

    Args:
        model: any network; run in eval mode without gradients, left as it was found.
        batches: tensors, tuples whose first item is the input, or mappings of keyword arguments.
        layers: names, globs or `Layer`s; all prunable layers by default.
        progress: draw a bar.
        run_store: where to keep what the pass has reached, and to take it up again.
        key: what the run store calls it.
        counts_only: only count inputs; their moments and means stay empty.

    A layer that no batch reaches, an empty iterable, and NaN or infinite activations are errors
    that say so. Inputs are moved to the device of the model's first parameter.
    """
    batches = guarded(batches, again=False)
    chosen, run_store = _as_layers(model, layers), run_store or RunStore()
    seen, complete = _taken_up(run_store, key, chosen)
    if complete:
        return seen
    moments, shapes, begun = dict(seen.moments), set(seen.shapes), seen.batches
    samples, example, outputs = seen.samples, seen.example, list(seen.outputs[0])
    with (
        process_group().raise_together(),
        shown(progress),
        track("calibrate", length(batches)) as advance,
        watching(layer.on_input(partial(_count, layer, moments, counts_only)) for layer in chosen),
        evaluating(model),
    ):
        for index, batch in enumerate(batches):
            if index < begun:
                continue
            out = main_output(call(model, batch))
            outputs.append(0 if out is None else out.numel())
            bad = [name for name, m in moments.items() if not m.finite]
            if bad:
                raise CalibrationError(
                    f"layer '{bad[0]}': NaN or infinite input in batch {index}, or one whose "
                    "square is beyond float64. "
                    f"Check the data and the network on that batch."
                )
            samples += batch_size(batch)
            sample = _first_sample(batch)
            example = sample if example is None else example
            shapes |= set() if sample is None else {tuple(sample.shape)}
            advance(1)
            if run_store.due:
                seen = Calibration(
                    moments, samples, example, frozenset(shapes), index + 1, (outputs,)
                )
                run_store.write(key, *_packed(seen, complete=False))
    seen = _joined(
        Calibration(moments, samples, example, frozenset(shapes), len(outputs), (outputs,)),
        chosen,
        counts_only,
    )
    if seen.samples == 0:
        raise CalibrationError(
            "no calibration samples: the batches were empty. A generator can be used only once."
        )
    missing = [layer.name for layer in chosen if layer.name not in seen]
    if missing:
        raise CalibrationError(
            f"layer '{missing[0]}' was never reached by the calibration data ({len(missing)} "
            "such). "
            f"Skip it: skip={missing}, or --skip {missing[0]}."
        )
    run_store.write(key, *_packed(seen, complete=True))
    return seen


def _joined(seen: Calibration, layers: Sequence[Layer], counts_only: bool) -> Calibration:
    """What all processes of the group have seen together; a layer that some of them never reached counts where it was."""
    group = process_group()
    if group.size == 1:
        return seen
    told = group.all_gather(
        [
            list(seen),
            seen.samples,
            sorted(map(list, seen.shapes)),
            list(seen.outputs[0]),
            seen.batches,
        ]
    )
    moments, by_name = {}, {layer.name: layer for layer in layers}
    for name in dict.fromkeys(name for names, *_ in told for name in names):
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
    shapes = frozenset(tuple(shape) for _, _, some, _, _ in told for shape in some)
    outputs = tuple(tuple(sizes) for *_, sizes, _ in told)
    return Calibration(
        moments, sum(s for _, s, *_ in told), example, shapes, sum(n for *_, n in told), outputs
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


def _taken_up(run_store: RunStore, key: str, layers: Sequence[Layer]) -> tuple[Calibration, bool]:
    """What an earlier pass has reached, and whether that was the end."""
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


def _count(layer: Layer, moments: dict[str, Moments], counts_only: bool, x: Tensor) -> None:
    """Add one call's input to the moments of its layer."""
    if layer.name not in moments:
        moments[layer.name] = Moments.of(layer, x.device, counts_only=counts_only)
    if counts_only:
        moments[layer.name].note(x.detach(), layer.vectors(x))
        return
    for piece in layer.patches(x.detach()):
        moments[layer.name].add(piece)


def _as_layers(
    model: nn.Module, layers: str | Iterable[str] | Sequence[Layer] | None
) -> list[Layer]:
    if layers is None or isinstance(layers, str):
        return find_layers(model, layers)
    listed = list(layers)
    if listed and all(isinstance(x, Layer) for x in listed):
        return [x for x in listed if isinstance(x, Layer)]
    return find_layers(model, [x for x in listed if isinstance(x, str)])


def _first_sample(batch: Any) -> Tensor | None:
    """One input to learn shapes from; None where the model takes keywords."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    return (
        batch[:1].detach().clone()
        if isinstance(batch, Tensor) and batch.dim() > 0 and len(batch)
        else None
    )
