"""A network as a row of blocks: stretches that are calibrated, solved and refitted one by one.

There are three makers of blocks. Steps of the traced graph are the smallest. Repeated blocks of a
module list serve decoders, encoders and residual networks, traced or not. Running the whole network
for every layer is the last resort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lobs._system.distributed import process_group
from lobs.calibration.blocks.arguments import cast, flowing, rows_of, shapes
from lobs.calibration.blocks.base import (
    KEPT_BACK,
    Block,
    LayerPair,
    held_out_whole,
    layers_of,
    loaded,
)
from lobs.calibration.blocks.repeated import Repeated, Sample, repeated_blocks
from lobs.calibration.blocks.rerun import Rerun
from lobs.calibration.blocks.rows import candidates
from lobs.calibration.blocks.traced import given_names, traced_steps
from lobs.calibration.forward import evaluating

__all__ = [
    "KEPT_BACK",
    "Block",
    "LayerPair",
    "Repeated",
    "Sample",
    "candidates",
    "cast",
    "flowing",
    "held_out_whole",
    "in_blocks",
    "layers_of",
    "loaded",
    "repeated_blocks",
    "rows_of",
    "shapes",
]


def in_blocks(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    *,
    repeated: bool = False,
    vectors: Mapping[str, int] | None = None,
) -> Iterator[Block]:
    """Yield the blocks of a network in running order; each advances before the next comes.

    The caller writes a block's layers before it asks for the next block. Later blocks then see
    its new outputs.

    Args:
        dense: the network before pruning.
        pruned: the copy whose layers the caller writes.
        batches: an iterable that can be read more than once.
        layers: pairs of one layer in the dense and the pruned network, in running order.
        repeated: prefer repeated blocks to the steps of a traced graph, and hold out one sample
            in eight, to choose the aim of layers and to judge a refit on.
        vectors: number of each layer's input vectors. Where that is far more than its moment needs,
            some positions of every image serve. By default all do.
    """
    with evaluating(dense), evaluating(pruned):
        for block in _made(dense, pruned, batches, layers, repeated):
            block.vectors = vectors or {}
            yield block
            block.advance()


def _made(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    repeated: bool,
) -> list[Block]:
    if repeated:
        found = repeated_blocks(dense, pruned, batches, layers, hold_out=True)
        if found:
            return found
    names = given_names(dense, batches)
    with process_group().raise_together():
        steps = traced_steps(dense, pruned, batches, layers, names, hold_out=repeated)
    if steps is not None:
        return steps
    return repeated_blocks(dense, pruned, batches, layers) or [
        Rerun(dense, pruned, batches, layers, hold_out=repeated)
    ]
