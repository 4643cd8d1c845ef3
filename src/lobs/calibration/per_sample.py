"""Record, for every sample, how clear its dense answer is and how far each layer has moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lobs.layers import Layer
from lobs.layers.discovery import is_plain_layer
from lobs.solvers import linalg

ROUNDING = 1e-6  # of float32 outputs, relative to their norm


class PerSample:
    """Hold margins and deviations of samples, in the order in which they were read.

    A margin is the distance between the two largest numbers of a dense output row. Nothing is
    recorded of networks whose output is not one row of several numbers for each sample.

    Attributes:
        known: whether every batch had such an output.
        lost: layers whose outputs have no row for each sample, or that run more than once.
    """

    def __init__(self) -> None:
        self.known = True
        self.lost: set[str] = set()
        self._margins: list[Tensor] = []
        self._moved: dict[str, list[Tensor]] = {}
        self._pending: dict[str, Tensor] = {}

    def sizes(self, name: str, z: Tensor) -> Tensor | None:
        """Return ‖z‖ of every sample of a layer's output; None where nothing is recorded of it."""
        if not self.known or name in self.lost:
            return None
        if name in self._pending or z.dim() < 2:
            self.lost.add(name)
            return None
        return linalg.squares(z.detach().flatten(1)).sqrt()

    def add_layer(self, name: str, size: Tensor | None, moved: Tensor) -> None:
        """Add one call of a layer, before `end` is called for its batch.

        Args:
            name: the layer's name.
            size: what `sizes` gave for its dense output.
            moved: how far the output moved, of the same shape.
        """
        if size is not None:
            moved_by = linalg.squares(moved.detach().flatten(1)).sqrt()
            self._pending[name] = moved_by + ROUNDING * size

    def end(self, dense: Tensor | None, count: int) -> None:
        """End a batch.

        Args:
            dense: the dense network's output; None where it is no tensor.
            count: samples of the batch.
        """
        rows = dense is not None and dense.dim() == 2 and dense.shape[1] > 1
        if not rows or dense is None or len(dense) != count:
            self.known = False
        if self.known and dense is not None:
            first, second = dense.detach().to(torch.float64).topk(2, dim=1).values.unbind(1)
            rounding = ROUNDING * linalg.squares(dense.detach()).sqrt()
            self._margins.append((first - second - rounding.to(first)).cpu())
            self.lost |= {n for n, values in self._pending.items() if len(values) != count}
            for name, values in self._pending.items():
                self._moved.setdefault(name, []).append(values.cpu())
        self._pending.clear()

    def certified(self, gains: Mapping[str, float]) -> tuple[int, int] | None:
        """Return how many samples keep their answer whatever happens behind the layers, and of all.

        The difference of two numbers changes by at most √2 times the row's change. The top answer
        therefore stays where the margin is larger than that. None where a layer is not known.

        Args:
            gains: factors from each layer's deviation to the output.
        """
        margins = self._joined(self._margins)
        if not self.known:
            return None
        if margins is None:  # this process read no samples
            return 0, 0
        bound = torch.zeros_like(margins)
        for name, gain in gains.items():
            moved = self._joined(self._moved.get(name, []))
            if name in self.lost or moved is None or len(moved) != len(margins):
                return None
            bound += gain * moved
        return int((margins > 2**0.5 * bound).sum()), len(margins)

    @staticmethod
    def _joined(parts: list[Tensor]) -> Tensor | None:
        return torch.cat(parts) if parts else None


def applied(layer: Layer, x: Tensor) -> Tensor | None:
    """Return a plain layer's output for an input, without its hooks; None for other layers."""
    module: nn.Module = layer.module
    if not is_plain_layer(module) or isinstance(module, nn.MultiheadAttention):
        return None
    out = type(module).forward(module, x)
    return out if isinstance(out, Tensor) else None
