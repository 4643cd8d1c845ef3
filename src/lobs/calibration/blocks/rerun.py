"""The last resort: run the whole network from its start for every layer.

That costs one pass of both networks per layer. A pass stops as soon as the layer is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from lobs.calibration.blocks.base import Block, LayerPair, Run
from lobs.calibration.forward import call, length


class Rerun(Block):
    """Layers that are reached by running the network from its start."""

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        batches: Iterable[Any],
        layers: Sequence[LayerPair],
        *,
        hold_out: bool = False,
    ) -> None:
        super().__init__(layers, "")
        self.models, self.batches = (dense, pruned), batches
        self.holds_out, self.count = hold_out, length(batches) or 0

    def both(self) -> Iterator[tuple[Run, Run]]:
        """See `Block`."""
        dense, pruned = self.models
        for batch in self.batches:
            yield partial(call, dense, batch), partial(call, pruned, batch)
