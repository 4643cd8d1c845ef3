"""`accelerate`: replace every layer by its fastest exact implementation, measured here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.progress import shown, track
from lobs._system.stopwatch import Interval, median, speedup, take_turns
from lobs.calibration.forward import batch_size, call
from lobs.deploy.accelerate.fusing import fuse, replaced
from lobs.deploy.accelerate.layerwise import LayerTiming, close, measure_layer, replaceable, runner
from lobs.layers.hooks import before_forward


@dataclass(frozen=True, eq=False, repr=False)
class Acceleration:
    """An accelerated copy of a network and its measurements.

    `model` is for inference: its parameters are frozen.
    """

    model: nn.Module
    layers: tuple[LayerTiming, ...]
    dense: Interval
    accelerated: Interval
    speedup: Interval
    batch: int
    note: str = ""

    def __repr__(self) -> str:
        return (
            f"Acceleration({self.speedup:.2f} times faster at batch {self.batch}, "
            f"{len(self.layers)} layers measured)"
        )

    def summary(self) -> str:
        """Return a table in plain text: microseconds by layer and implementation."""
        kinds = [
            k
            for k in ("dense", "csr", "bsr", "compiled", "shrunk")
            if any(k in row.seconds for row in self.layers)
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
        return "\n".join(lines + ([self.note] if self.note else []))


def accelerate(
    model: nn.Module,
    example: Any,
    *,
    margin: float = 0.05,
    seconds: float = 0.5,
    progress: bool = True,
) -> Acceleration:
    """Return a copy with every layer in the fastest exact implementation for an example batch.

    Each Linear and Conv2d is timed on the input it gets from `example`. The candidates are dense
    torch, torch's CSR and BSR, a compiled sparse kernel, and dense without empty rows and columns.
    Runs of Linear and ReLU in a Sequential are also tried as one compiled call. A replacement must
    win by more than `margin` and by more than the noise. So must the whole network in the end,
    otherwise it stays dense.

    The copy computes densely in cases that were not measured: training, gradients, autocast, other
    devices and dtypes, and inputs more than twice as large or small. If its weights change in place
    (not through `.data`), the sparse copies follow.

    Args:
        model: the network; it is copied, not changed.
        example: a batch of the size to expect: a tensor, a tuple whose first item is the input, or
            a mapping of keyword arguments.
        margin: the smallest gain of a replacement, as a fraction.
        seconds: about how long to measure each layer.
        progress: show a bar while measuring.
    """
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    fast = copy.deepcopy(dense)
    with shown(progress), torch.no_grad():
        inputs = _inputs(fast, example)
        rows = []
        with track("measure layers", len(inputs)) as advance:
            for name, x in inputs.items():
                row, better = measure_layer(name, fast.get_submodule(name), x, margin, seconds)
                rows.append(row)
                fast = replaced(fast, name, better) if better is not None else fast
                advance(1)
        fast, fused = fuse(fast, inputs, example, margin, seconds)
        return _compare(dense, fast, (*rows, *fused), example, 2 * seconds)


def _compare(
    dense: nn.Module, fast: nn.Module, rows: tuple[LayerTiming, ...], example: Any, seconds: float
) -> Acceleration:
    """Time the whole network both ways; keep the dense one unless the other is surely faster."""
    samples = take_turns(
        {"dense": runner(dense, example), "fast": runner(fast, example)}, seconds, 41
    )
    gain, note = speedup(samples["dense"], samples["fast"]), ""
    if all(row.chosen == "dense" for row in rows):
        note = "no layer was reliably faster another way, so the network stays dense"
    elif gain.low <= 1 or not close(_outputs(fast, example), _outputs(dense, example)):
        note = "the whole network was not reliably faster, so it stays dense"
        fast = dense
    if note:
        samples["fast"], gain = samples["dense"], Interval(1.0, 1.0, 1.0)
    return Acceleration(
        model=fast,
        layers=rows,
        dense=median(samples["dense"]),
        accelerated=median(samples["fast"]),
        speedup=gain,
        batch=batch_size(example),
        note=note,
    )


def _inputs(model: nn.Module, example: Any) -> dict[str, Tensor]:
    """Return the first input of each replaceable layer."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if not replaceable(module):
            continue

        def watch(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                found.setdefault(name, args[0].detach().clone())

        handles.append(before_forward(module, watch))
    try:
        call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Return every floating-point tensor of a network's output."""
    leaves = torch.utils._pytree.tree_leaves(call(model, example))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _micro(value: Interval) -> str:
    return f"{Interval(value.middle * 1e6, value.low * 1e6, value.high * 1e6):.1f}"
