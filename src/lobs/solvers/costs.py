"""What solving costs: the size of a problem, and the speeds by which solvers estimate time."""

from __future__ import annotations

from dataclasses import dataclass, field

from lobs._system.context import Context
from lobs.targets import Target


@dataclass(frozen=True)
class CostModel:
    """Measured speeds on two cores, fitted by `python -m benchmarks.rivals --costs`.

    All but the last two are seconds per 10⁹ multiply-adds. Choices depend on their ratios only.

    Args:
        greedy: downdates of the greedy's inverses.
        product: products of large matrices.
        factor: a Cholesky factorisation and the inverse from it.
        blocks: group OBS, which removes blocks of columns.
        decomposition: an eigendecomposition, per 10⁹ d³; rival solvers begin with one.
        group_swaps: swaps within N:M groups, in multiples of the greedy's time on the same layer
            (`benchmarks.patterns`).
        group: seconds that each group of a layer takes, however narrow (`benchmarks.depthwise`).
    """

    greedy: float = 0.024
    product: float = 0.021
    factor: float = 0.030
    blocks: float = 0.25
    decomposition: float = 0.1
    group_swaps: int = 3
    group: float = 1e-3


COSTS = CostModel()


@dataclass(frozen=True)
class ProblemShape:
    """The size of a layer problem, known before any data is seen.

    Args:
        groups: number of groups, each with a moment of its own.
        rows: rows per group.
        columns: columns per group, the bias column included.
        protected: trailing columns that may not be removed.
        target: what is asked of the layer, as far as the cost depends on it.
        single_copy: the moment is kept once, in single precision (a wide layer).
        context: processes and memory that solving may use.

    >>> ProblemShape(groups=2, rows=8, columns=10, protected=1).weights
    144
    """

    groups: int
    rows: int
    columns: int
    protected: int = 0
    target: Target | None = None
    single_copy: bool = False
    context: Context = field(default=Context())

    @property
    def weights(self) -> int:
        """Number of prunable weights."""
        return self.groups * self.rows * (self.columns - self.protected)

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments: one float32 copy, or five float64 ones.

        The five are the sums, Ψ, its equilibrated form, the inverse of that, and a work copy.
        """
        return (4 if self.single_copy else 40) * self.groups * self.columns**2

    @property
    def solving_bytes(self) -> int:
        """Bytes of the moments and of seven float64 copies of the weights.

        Most solvers take this much. In single precision ADMM and swaps take ten float32 copies.
        """
        copies = 56 * self.weights
        if self.single_copy:
            copies = max(copies, 40 * self.rows * self.columns)
        return self.moment_bytes + copies
