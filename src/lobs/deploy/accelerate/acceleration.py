"""`accelerate`: replace every layer by its fastest exact implementation, measured here."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.memory import give_back
from lobs._system.progress import shown, track
from lobs._system.stopwatch import Interval, cache_bytes, median, speedup, take_turns
from lobs.calibration.forward import batch_size, call
from lobs.deploy.accelerate.engines import version
from lobs.deploy.accelerate.fusing import fuse, replaced
from lobs.deploy.accelerate.layerwise import (
    KINDS,
    LayerTiming,
    Measuring,
    close,
    measure_layer,
    replaceable,
    runner,
)
from lobs.deploy.accelerate.modules import densely
from lobs.deploy.accelerate.native import STORAGES, Storage
from lobs.deploy.accelerate.norms import fold_norms
from lobs.deploy.accelerate.packed import release_dense as release
from lobs.deploy.accelerate.shared import share
from lobs.errors import LobsError
from lobs.layers.hooks import before_forward

_ROUNDING = 1e-4  # of the output: more is no other order of sums


@dataclass(frozen=True, eq=False, repr=False)
class Acceleration:
    """An accelerated copy of a network and its measurements.

    `model` is for inference: its parameters are frozen. `change` is by how much its output differs
    from the given network's on the example, relative to the output's norm.
    """

    model: nn.Module
    layers: tuple[LayerTiming, ...]
    dense: Interval
    accelerated: Interval
    speedup: Interval
    batch: int
    note: str = ""
    change: float = 0.0

    def __repr__(self) -> str:
        return (
            f"Acceleration({self.speedup:.2f} times faster at batch {self.batch}, "
            f"{len(self.layers)} layers measured)"
        )

    def summary(self) -> str:
        """Return a table in plain text: microseconds by layer and implementation."""
        kinds = [
            k for k in ("dense", "single", *KINDS) if any(k in row.seconds for row in self.layers)
        ]
        width = max([len(row.name) for row in self.layers] + [5])
        head = f"{'layer':<{width}}  {'shape':>14}  {'kept':>6}" + "".join(
            f"  {k + ' µs':>12}" for k in kinds
        )
        lines = [f"{head}  {'chosen':>9}  {'crossover':>9}"]
        for row in self.layers:
            cells = "".join(
                f"  {row.seconds[k] * 1e6:>12.1f}" if k in row.seconds else f"  {'–':>12}"
                for k in kinds
            )
            crossover = "–" if row.crossover is None else f"{row.crossover:.1%}"
            shape = "×".join(map(str, row.shape))
            lines.append(
                f"{row.name:<{width}}  {shape:>14}  {row.kept:>6.1%}{cells}  {row.chosen:>9}  "
                f"{crossover:>9}"
            )
        lines.append(
            f"whole network, batch {self.batch}: dense {_micro(self.dense)} µs, accelerated "
            f"{_micro(self.accelerated)} µs, "
            f"{self.speedup:.2f} times faster (medians with 95 % intervals)"
        )
        if self.change > _ROUNDING:
            lines.append(f"rounded values change the output by {self.change:.2%} on the example")
        return "\n".join(lines + ([self.note] if self.note else []))


def accelerate(
    model: nn.Module,
    example: Any,
    *,
    margin: float = 0.05,
    seconds: float = 0.5,
    values: Storage = "float32",
    release_dense: bool = False,
    progress: bool = True,
) -> Acceleration:
    """Return a copy with every layer in the fastest implementation for an example batch.

    Each Linear, Conv2d and transformers' Conv1D is timed on its input: dense, as CSR or BSR, in
    compiled kernels, and dense without empty rows and columns. Layers that read one input, chains
    of Linear and ReLU, and convolutions with their batch norms are also tried as one call. A
    replacement must win by `margin` and the noise, and so must the whole network in the end.
    The copy computes densely in training, with gradients, autocast, other devices and dtypes, and
    for inputs over twice as large or small. Sparse copies follow weights that change in place.

    Args:
        model: the network; it is copied, not changed.
        example: a batch of the size to expect: a tensor, a tuple whose first item is the input, or
            a mapping of keyword arguments.
        margin: the smallest gain of a replacement, as a fraction.
        seconds: about how long to measure each layer; like layers are measured once.
        values: how kept weights are stored for few inputs. All but "float32" round them.
        release_dense: drop dense weights of linear layers where the packed form is smaller and, but
            for the margin, as fast. They then always compute from packed weights.
        progress: show a bar while measuring.
    """
    if values not in STORAGES:
        raise LobsError(f"values is {values!r}: use one of {', '.join(STORAGES)}.")
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    fast = copy.deepcopy(dense)
    with shown(progress), torch.no_grad():
        inputs, groups = inputs_of(fast, example)
        measuring = Measuring(margin, seconds, values, is_cold(fast, inputs), release_dense)
        rows: list[LayerTiming] = []
        known: dict[Any, LayerTiming] = {}
        with track("measure layers", len(inputs)) as advance:
            for name, x in inputs.items():
                layer = fast.get_submodule(name)
                kind = kind_of(layer, x)
                row, better = measure_layer(name, layer, x, measuring, known.get(kind))
                known.setdefault(kind, row)
                rows.append(row)
                fast = replaced(fast, name, better) if better is not None else fast
                advance(1)
        rows += share(fast, groups, inputs, measuring)
        rows += fold_norms(fast, inputs, example, measuring)
        if values == "float32":  # fused runs hold float32 values
            fast, fused = fuse(fast, inputs, example, margin, seconds)
            rows += fused
        least = margin if release_dense else 0.0  # of speed, given for memory
        done = _compare(dense, fast, tuple(rows), example, seconds=2 * seconds, loss=least)
        if release_dense:
            release(done.model)
            del dense, fast
            give_back()
        return done


def is_cold(model: nn.Module, names: Iterable[str]) -> bool:
    """Return whether the weights of these layers are more than the processor's cache holds."""
    weights = (model.get_submodule(name).weight for name in names)
    return sum(w.numel() * 4 for w in weights if isinstance(w, Tensor)) > cache_bytes()


def kind_of(layer: nn.Module, x: Tensor) -> Any:
    """Return a key that is equal for layers which take the same time, about."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    settings = [getattr(layer, name, None) for name in ("stride", "padding", "dilation", "groups")]
    kept = round(float((weight != 0).float().mean()), 2)
    return type(layer), weight.shape, layer.bias is None, str(settings), x.shape, x.stride(), kept


def _compare(
    dense: nn.Module,
    fast: nn.Module,
    rows: tuple[LayerTiming, ...],
    example: Any,
    *,
    seconds: float,
    loss: float,
) -> Acceleration:
    """Time the whole network both ways; keep the dense one unless the other is surely faster.

    Args:
        dense: the network.
        fast: the network with replacements.
        rows: what was chosen for each layer.
        example: a batch.
        seconds: about how long to measure; at least a second, or 41 rounds.
        loss: how much slower than dense, as a fraction, is fast enough; 0 asks for faster.
    """
    runs = {"dense": runner(dense, example), "fast": runner(fast, example)}
    samples = take_turns(runs, max(1.0, seconds), 41)
    gain, note = speedup(samples["dense"], samples["fast"]), ""
    before, after = _outputs(dense, example), _outputs(fast, example)
    with densely(fast):
        plain = _outputs(fast, example)  # its weights may be rounded
    if all(row.chosen in ("dense", "single") for row in rows):
        note = "no layer was reliably faster another way, so the network stays dense"
    elif (gain.middle < 1 - loss if loss else gain.low <= 1) or not close(after, plain):
        note = "the whole network was not reliably faster, so it stays dense"
        fast = dense
    if note:
        samples["fast"], gain, after = samples["dense"], Interval(1.0, 1.0, 1.0), before
    return Acceleration(
        model=fast,
        layers=rows,
        dense=median(samples["dense"]),
        accelerated=median(samples["fast"]),
        speedup=gain,
        batch=batch_size(example),
        note=note,
        change=_change(before, after),
    )


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return by how much outputs moved, relative to their norm."""
    moved = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True))
    size = sum(float(b.double().square().sum()) for b in before)
    return float((moved / size) ** 0.5 if size else moved**0.5)


def inputs_of(model: nn.Module, example: Any) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Return the first input of each replaceable layer, and groups that got the same tensor."""
    found: dict[str, Tensor] = {}
    given: dict[tuple[int, int], list[str]] = {}
    alive = []  # so that no two inputs have one id
    handles = []
    for name, module in model.named_modules():
        if not replaceable(module):
            continue

        def watch(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel() and name not in found:
                x = args[0]
                found[name] = x.detach().clone()
                alive.append(x)
                given.setdefault((id(x), version(x)), []).append(name)

        handles.append(before_forward(module, watch))
    try:
        call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found, list(given.values())


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Return every floating-point tensor of a network's output."""
    leaves = torch.utils._pytree.tree_leaves(call(model, example))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _micro(value: Interval) -> str:
    return f"{Interval(value.middle * 1e6, value.low * 1e6, value.high * 1e6):.1f}"
