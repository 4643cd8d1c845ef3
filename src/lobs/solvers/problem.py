"""The layer problem: minimise tr((V − W) Ψ (V − W)ᵀ) over sparse V.

Rows are output units. They share Ψ. A grouped layer has one Ψ per group and weights of shape
(groups, rows, columns). A mask and a count always refer to the layer as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lobs._system.context import Context
from lobs.solvers.checks import check_problem
from lobs.solvers.costs import ProblemShape
from lobs.solvers.linalg import strip_size
from lobs.solvers.metric import Metric, metrics
from lobs.solvers.solution import Solution
from lobs.targets import Target

# Measured relative error of Ψ's entries, which are sums of float32 products.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to make sparse.

    Args:
        weight: W, (rows, columns) or (groups, rows, columns).
        moment: Ψ = (1/n) Y Yᵀ, (columns, columns) or (groups, columns, columns).
        bias_column: the last column multiplies the constant 1. It is never removed, but it takes
            part in the refit.
        mean: mean input, (columns,) or (groups, columns); needed by `apozw` only.
        samples: number of inputs that Ψ averages. With fewer than ten per column Ψ is damped.
        damping: λ added to Ψ's diagonal. None lets `lobs.solvers.metric` choose: 0, unless Ψ is
            singular or has few samples.
        least_damping: λ that is added at least, where λ is left to be chosen.
        row_weight: importance of each row's error, (rows,) or (groups, rows). It decides which
            weights go. Reported errors are unweighted.
        positions: number of consecutive columns per input channel: the size of a convolution's
            kernel.
        name: the layer's name in messages.
        curvature: diagonal of the loss's curvature in the weight's shape; needed by `obd-fisher`
            only.
        ridge: constant that the diagonal of `moment` holds in addition to Ψ. Errors exclude it.
            Used for moments too large to copy.
        units: factor by which each column of the layer's own weights was multiplied. `solve`
            divides solutions by it.
        kind: dtype of the layer's own weights, where it differs from `weight`.
        context: processes and memory that solving may use.

    >>> w = torch.tensor([[1.0, 2.0, 3.0]])
    >>> Problem(w, torch.eye(3)).error_of(torch.tensor([[0.0, 2.0, 3.0]]))
    1.0
    """

    weight: Tensor
    moment: Tensor
    bias_column: bool = False
    mean: Tensor | None = None
    samples: int | None = None
    damping: float | None = None
    least_damping: float = 0.0
    row_weight: Tensor | None = None
    positions: int = 1
    name: str = "layer"
    curvature: Tensor | None = None
    ridge: float = 0.0
    units: Tensor | None = None
    kind: torch.dtype | None = None
    context: Context = field(default=Context())

    def __post_init__(self) -> None:
        for part in ("weight", "moment", "mean", "row_weight", "curvature"):
            tensor = getattr(self, part)
            if isinstance(tensor, Tensor):
                object.__setattr__(self, part, tensor.detach())
        check_problem(self)

    def __repr__(self) -> str:
        size = "×".join(map(str, self.weight.shape))
        kind = str(self.weight.dtype).removeprefix("torch.")
        return f"Problem({self.name}: {size} {kind}, samples={self.samples})"

    @property
    def shape(self) -> ProblemShape:
        """The problem's size, by which solvers estimate their time and memory."""
        return ProblemShape(
            groups=len(self.groups),
            rows=self.weight.shape[-2],
            columns=self.weight.shape[-1],
            protected=self.protected,
            single_copy=self.units is not None,
            context=self.context,
        )

    @property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, moment) of every group; one pair for an ungrouped layer."""
        if self.weight.dim() == 2:
            return [(self.weight, self.moment)]
        return list(zip(self.weight, self.moment, strict=True))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Every group's moment prepared for solving, factorised once."""
        return tuple(self.damped_metrics())

    def damped_metrics(self, first: float = 0.0) -> list[Metric]:
        """Return the metrics with damping that starts from `first` where a moment is singular."""
        if self.units is not None:  # a wide layer's moment was prepared when it was built
            return list(self.metrics)
        psi = self.moment if self.moment.dim() == 3 else self.moment.unsqueeze(0)
        return metrics(
            psi,
            self.damping,
            first=first,
            least=self.least_damping,
            protected=self.protected,
            name=self.name,
            samples=self.samples,
        )

    def some_rows(self, rows: Tensor) -> Problem:
        """Return the problem restricted to these rows of every group."""
        weight = self.weight.index_select(-2, rows)
        part = replace(self, weight=weight, row_weight=self.importance.index_select(-1, rows))
        part.__dict__["metrics"] = self.metrics  # the same moment, already factorised
        return part

    @property
    def protected(self) -> int:
        """Number of trailing columns that may not be removed: 1 with a bias column, else 0."""
        return int(self.bias_column)

    @property
    def prunable(self) -> int:
        """Number of weights that may be removed."""
        return self.weight.numel() - self.protected * self.weight[..., 0].numel()

    @property
    def own_weight(self) -> Tensor:
        """The layer's own weights in float64."""
        weight = self.weight.to(torch.float64)
        return weight if self.units is None else weight / self.units

    @property
    def own_type(self) -> torch.dtype:
        """The dtype of the layer's own weights."""
        return self.kind or self.weight.dtype

    @property
    def importance(self) -> Tensor:
        """`row_weight` as (groups, rows) in float64; ones by default."""
        shape = (len(self.groups), self.weight.shape[-2])
        if self.row_weight is None:
            return torch.ones(shape, dtype=torch.float64, device=self.weight.device)
        return self.row_weight.to(self.weight.device, torch.float64).reshape(shape)

    @cached_property
    def energy(self) -> float:
        """Mean squared output of the dense layer, tr(W Ψ Wᵀ)."""
        return max(0.0, float(self._by_row(self.weight, None).sum()))

    def error_of(self, weight: Tensor) -> float:
        """Return E of a replacement for `weight`, in the same units, in float64."""
        return max(0.0, float(self._by_row(weight, self.weight).sum()))

    def row_errors_of(self, weight: Tensor) -> Tensor:
        """Return E by row, (groups, rows)."""
        return self._by_row(weight, self.weight).view(len(self.groups), self.weight.shape[-2])

    def own_error_of(self, weight: Tensor) -> float:
        """Return E of a replacement for the layer's own weights."""
        return self.error_of(self._in_units(weight))

    def hidden_error_of(self, weight: Tensor) -> float:
        """Bound what rounding of Ψ may hide of the error of the layer's own weights.

        Entries of Ψ are right to 1e-6 · √(Ψ_ii Ψ_jj), as measured. So E is right to
        1e-6 · Σ_rows (Σ_i |δ_i| √Ψ_ii)².
        """
        return _ROUNDING * self._collinear_energy(self._in_units(weight), self.weight)

    def largest_error_of(self, weight: Tensor) -> float:
        """Return E of the layer's own weights plus what rounding may hide, for bounds."""
        return self.own_error_of(weight) + self.hidden_error_of(weight)

    def given_back(self, solution: Solution) -> Solution:
        """Return a solution as the layer's own weights, with the error of exactly these bits."""
        if self.units is None:
            return solution
        most = torch.finfo(self.own_type).max
        weight = solution.weight.div_(self.units).clamp_(-most, most).to(self.own_type)
        return replace(solution, weight=weight, error=self.own_error_of(weight))

    @property
    def largest_energy(self) -> float:
        """Upper bound of `energy`: its value if all inputs were collinear."""
        return self._collinear_energy(self.weight, None)

    def _collinear_energy(self, weight: Tensor, other: Tensor | None) -> float:
        """Return Σ_rows (Σ_i |δ_i| √Ψ_ii)²: what E would be if all inputs were collinear."""
        energy = self.moment.diagonal(dim1=-2, dim2=-1).to(torch.float64)
        size = energy.clamp_min(0.0).sqrt().unsqueeze(-1)
        deltas = _differences(weight, other)
        return sum(float((delta.abs() @ size).square().sum()) for delta in deltas)

    def _in_units(self, weight: Tensor) -> Tensor:
        return weight if self.units is None else weight.to(self.weight.dtype) * self.units

    def _by_row(self, weight: Tensor, other: Tensor | None) -> Tensor:
        """Return δ Ψ δᵀ of every row, in strips of rows; of wide moments in strips of columns."""
        d = self.moment.shape[-1]
        step = strip_size(d) if self.ridge else d
        parts = []
        for delta in _differences(weight, other):
            found = -self.ridge * delta.square().sum(dim=-1)
            for start in range(0, d, step):
                part = self.moment[..., start : start + step].to(torch.float64)
                found += ((delta @ part) * delta[..., start : start + step]).sum(dim=-1)
            parts.append(found)
        return torch.cat(parts, dim=-1)


def _differences(weight: Tensor, other: Tensor | None) -> Iterator[Tensor]:
    """Yield `weight − other`, or `weight` alone, in float64 and in strips of rows."""
    step = strip_size(weight[..., 0, :].numel()) if weight.shape[-2] else 1
    rows = torch.split(weight, step, dim=-2)
    if other is None:
        yield from (some.to(torch.float64) for some in rows)
        return
    for some, less in zip(rows, torch.split(other, step, dim=-2), strict=True):
        yield some.to(torch.float64) - less.to(torch.float64)


@runtime_checkable
class Solver(Protocol):
    """Anything that turns a problem and a target into a solution.

    A solver should also bring `seconds(shape)` and `bytes(shape)`, its estimated time and memory
    on a `ProblemShape`. Without them it counts as `auto` in forecasts.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Names of optional `Problem` fields that must be present."""
        ...

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        ...
