"""Run a network on one batch, to learn what a pass over all of the data takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.collect import collect_moments
from lobs.calibration.forward import length
from lobs.calibration.moments import weighed
from lobs.layers import Layer, watching
from lobs.solvers.costs import COSTS


@dataclass(frozen=True)
class Probe:
    """What one batch tells of a pass over the data.

    Args:
        forward: seconds of all batches forward.
        products: seconds of the products of all moments in one network.
        paired: seconds of these products in two networks.
        bytes: bytes of a batch's activations.
        batches: number of batches.
        samples: number of samples.
        outputs: numbers that the network returns for one sample.
        madds: multiply-adds of the layers for one sample.
    """

    forward: float
    products: float
    paired: float
    bytes: int
    batches: int
    samples: int
    outputs: float
    madds: float


def probed(model: nn.Module, batches: Iterable[Any], layers: Sequence[Layer]) -> Probe:
    """Run the network on the first batch and take the others to be like it."""
    first = list(islice(batches, 1))  # empty on a process without data
    for _ in range(2):  # the first time also loads and compiles
        began = time.perf_counter()
        with memory.most_resident() as peak:
            before = memory.resident()
            with watching(layer.on_input(partial(_first_patches, layer)) for layer in layers):
                seen = collect_moments(model, first, layers, counts_only=True, required=False)
        took = time.perf_counter() - began
    count = max(process_group().all_gather(length(batches) or sum(1 for _ in batches)))
    madds = paired = 0
    reached = [layer for layer in layers if layer.name in seen]
    for layer in reached:
        vectors, d = seen.count(layer.name) * layer.groups, layer.columns + 1
        madds += vectors * d**2
        paired += vectors * d * (d + (2 * layer.rows if weighed(layer) else d))
    unit = count * COSTS.product / 1e9
    each = max(1, seen.samples)
    uses = sum(
        seen.count(layer.name) * layer.uses_per_patch * layer.weight.numel() for layer in reached
    )
    return Probe(
        forward=count * took,
        products=unit * madds,
        paired=unit * paired,
        bytes=max(0, peak[0] - before),
        batches=count,
        samples=count * seen.samples,
        outputs=sum(map(sum, seen.outputs)) / each,
        madds=uses / each,
    )


def _first_patches(layer: Layer, x: Tensor) -> None:
    """Unfold the first patches of an input, so that their memory is counted."""
    next(layer.patches(x.detach()), None)
