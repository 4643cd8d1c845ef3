"""Layers that read the same input as one call: query, key and value, or gate and up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lobs._system.stopwatch import median
from lobs.deploy.accelerate.engines import weight_matrix
from lobs.deploy.accelerate.fusing import replaced
from lobs.deploy.accelerate.layerwise import (
    LayerTiming,
    Measuring,
    best,
    close,
    is_linear,
    replaceable,
)
from lobs.deploy.accelerate.modules import with_engine
from lobs.deploy.accelerate.native import MOST_SAMPLES
from lobs.deploy.accelerate.native_engines import BitmaskEngine


class _Call(NamedTuple):
    """The last call: its input, how often that had changed in place, the matrix, outputs left."""

    x: Tensor
    version: int
    matrix: Any
    left: dict[int, Tensor]


class SharedInput:
    """Several layers as one matrix. The first to be called computes for all."""

    def __init__(self, engine: BitmaskEngine) -> None:
        self.engine = engine
        sizes = [len(weight_matrix(layer)) for layer in engine.layers]
        self.cuts = np.cumsum([0, *sizes]).tolist()
        self.last: _Call | None = None

    def output(self, x: Tensor, part: int) -> Tensor:
        """Return one layer's output.

        Args:
            x: the input.
            part: the layer's number.
        """
        engine, rows = self.engine, (self.cuts[part], self.cuts[part + 1])
        if x.is_inference():  # its changes are not counted, so nothing can be kept
            return engine.run(x, rows)
        last = self.last
        if (
            last is not None
            and last.x is x
            and last.version == x._version
            and last.matrix is engine.matrix
        ):
            found = last.left.pop(part, None)
            if not last.left:
                self.last = None
            if found is not None:
                return found
        whole = engine.run(x)
        parts = [whole[..., low:high].contiguous() for low, high in pairwise(self.cuts)]
        left = {i: out for i, out in enumerate(parts) if i != part}
        self.last = _Call(x, x._version, engine.matrix, left)
        return parts[part]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        """Return a copy that remembers no call."""
        twin = SharedInput.__new__(SharedInput)
        memo[id(self)] = twin
        twin.engine, twin.cuts, twin.last = copy.deepcopy(self.engine, memo), list(self.cuts), None
        return twin


class SharedPart:
    """One layer's part in a shared call."""

    def __init__(self, owner: SharedInput, part: int) -> None:
        self.owner, self.part, self.name = owner, part, f"{owner.engine.name}, shared"

    def takes(self, x: Tensor) -> bool:
        """Return whether the shared engine may compute this input."""
        return self.owner.engine.takes(x)

    def run(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.owner.output(x, self.part)


def share(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    inputs: Mapping[str, Tensor],
    measuring: Measuring,
) -> list[LayerTiming]:
    """Try layers that read the same input as one call.

    Args:
        model: the network; it is changed.
        groups: names of layers that were called with the same tensor. Like groups are measured
            once.
        inputs: the first input of each layer, by name.
        measuring: how to measure.
    """
    rows = []
    pays: dict[Any, bool] = {}
    for names in groups:
        layers = [model.get_submodule(name) for name in names]
        x = inputs[names[0]]
        few = x.dim() > 0 and x.numel() <= MOST_SAMPLES * x.shape[-1]
        if len(names) < 2 or not few or not all(map(_joins, layers)):
            continue
        if not any(isinstance(getattr(layer, "engine", None), BitmaskEngine) for layer in layers):
            continue
        kind = tuple((type(m), weight_matrix(m).shape) for m in layers), x.shape
        if pays.get(kind, True):
            together = _together(layers, x, measuring)
            if kind not in pays:
                row = _measure(names, layers, together, x, measuring)
                rows.append(row)
                pays[kind] = row.chosen == "shared"
            for name, layer in zip(names, together if pays[kind] else layers, strict=True):
                replaced(model, name, layer)
    return rows


def _together(layers: list[nn.Module], x: Tensor, measuring: Measuring) -> list[nn.Module]:
    """Return the layers as parts of one call."""
    engines = [getattr(layer, "engine", None) for layer in layers]
    found = next(engine for engine in engines if isinstance(engine, BitmaskEngine))
    owner = SharedInput(type(found)(layers, x, measuring.storage))
    together = [with_engine(layer, SharedPart(owner, i)) for i, layer in enumerate(layers)]
    owner.engine.attach(together)
    return together


def _joins(layer: nn.Module) -> bool:
    """Return whether a layer may be a part of a shared call."""
    engine = getattr(layer, "engine", None)
    return is_linear(layer) and (isinstance(engine, BitmaskEngine) or replaceable(layer))


def _measure(
    names: Sequence[str],
    layers: list[nn.Module],
    together: list[nn.Module],
    x: Tensor,
    measuring: Measuring,
) -> LayerTiming:
    """Time a group both ways.

    Args:
        names: names of the layers.
        layers: the layers as they are now.
        together: the layers as one call.
        x: their input.
        measuring: how to measure.
    """
    turns = {"dense": lambda: [m(x) for m in layers], "shared": lambda: [m(x) for m in together]}
    samples = measuring.turns(turns, x)
    chosen, gain = best(samples, measuring.margin)
    if chosen == "shared" and not close(turns["shared"](), turns["dense"]()):
        chosen, gain = "dense", 1.0
    weights = [weight_matrix(layer) for layer in layers]
    kept = sum(int((w != 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    times = {"single": median(samples["dense"]).middle, "shared": median(samples["shared"]).middle}
    shape = (sum(map(len, weights)), weights[0].shape[1])
    chosen = "shared" if chosen == "shared" else "single"
    return LayerTiming(" + ".join(names), shape, kept, times, chosen, gain)
