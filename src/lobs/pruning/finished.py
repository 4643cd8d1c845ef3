"""A finished layer: its solution and costs, and how they are stored and restored bit by bit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from torch import Tensor

from lobs.calibration.comparison import LayerDistance
from lobs.layers import Layer
from lobs.pruning.result import LayerResult
from lobs.solvers.scores import Histogram
from lobs.solvers.solution import Solution

Packed: TypeAlias = tuple[dict[str, Tensor], Any]
_TENSORS = ("weight", "mask", "curve")


@dataclass(frozen=True, eq=False)
class FinishedLayer:
    """A layer's solution, what it cost, and its largest error once rounding is counted."""

    solution: Solution
    largest_error: float
    seconds: float
    samples: int
    sensitivity: Histogram | None = None

    def result(self, layer: Layer, measured: LayerDistance | None) -> LayerResult:
        """Return the layer's line of the result.

        Args:
            layer: the layer it belongs to.
            measured: the distance between its outputs in the two networks. It stands in place of
                the solver's own error where inputs were asymmetric.
        """
        solution = self.solution
        error, relative = (
            (solution.error, solution.relative_error)
            if measured is None
            else (measured.mean_error, measured.relative)
        )
        return LayerResult(
            name=layer.name,
            shape=tuple(layer.weight.shape),
            kept=solution.kept,
            total=solution.prunable,
            error=error,
            relative_error=relative,
            damping=solution.damping,
            seconds=self.seconds,
            samples=self.samples,
            parameters=layer.parameters(),
            sensitivity=self.sensitivity,
        )

    def without_tensors(self) -> FinishedLayer:
        """Return the same with numbers only."""
        return replace(self, solution=self.solution.without_tensors())

    def packed(self) -> Packed:
        """Return tensors and a record for JSON, which restores floats exactly."""
        solution = {item.name: getattr(self.solution, item.name) for item in fields(Solution)}
        tensors = {name: t for name in _TENSORS if (t := solution.pop(name)) is not None}
        record = {
            "solution": solution,
            "largest_error": self.largest_error,
            "seconds": self.seconds,
            "samples": self.samples,
            "sensitivity": self.sensitivity and asdict(self.sensitivity),
        }
        return tensors, record

    @classmethod
    def unpacked(cls, packed: Packed, like: Tensor) -> FinishedLayer:
        """Restore a packed layer on the device of `like`."""
        tensors: dict[str, Any] = {name: t.to(like.device) for name, t in packed[0].items()}
        record, histogram = packed[1], packed[1]["sensitivity"]
        if histogram is not None:
            edges, counts = (tuple(histogram[part]) for part in ("edges", "counts"))
            histogram = Histogram(edges, counts, histogram["zeros"])
        solution = Solution(**tensors, **record["solution"])
        rest = (record["largest_error"], record["seconds"], record["samples"])
        return cls(solution, *rest, histogram)


def network_error(distance: LayerDistance, samples: int) -> float:
    """Return a layer's root mean square distance over the network's samples.

    Outputs are right to float32's last digit. The margin of 1e-6 keeps the bound valid.
    """
    return math.sqrt(distance.error / samples) + 1e-6 * math.sqrt(distance.energy / samples)
