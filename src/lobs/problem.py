"""The layer problem and its answer: min over sparse V of tr((V − W) Ψ (V − W)ᵀ).

Rows are output units; they share Ψ. A grouped layer carries one Ψ per group and weights of shape
(groups, rows, columns); a mask and a count always speak of the layer as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lobs.errors import ProblemError
from lobs.linalg import Metric, metric
from lobs.targets import ErrorBudget, Sparsity, Target


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to make sparse.

    Args:
        weight: W, (rows, columns) or (groups, rows, columns).
        moment: Ψ = (1/n) Y Yᵀ, (columns, columns) or (groups, columns, columns).
        bias_column: the last column multiplies the constant 1; it is never removed but helps to compensate.
        mean: mean input, (columns,) or (groups, columns); only `apozw` needs it.
        curvature: diagonal of the loss's curvature in the weight's shape; only `obd-fisher` needs it.
        samples: how many inputs Ψ averages, for messages.
        damping: λ added to Ψ's diagonal; None lets `linalg.metric` choose, 0 unless Ψ is singular.
        name: what messages call the layer.

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
    name: str = "layer"
    curvature: Tensor | None = None

    def __post_init__(self) -> None:
        for part in ("weight", "moment", "mean", "curvature"):
            tensor = getattr(self, part)
            if isinstance(tensor, Tensor):
                object.__setattr__(self, part, tensor.detach())
        w, psi = self.weight, self.moment
        if w.dim() not in (2, 3) or psi.dim() != w.dim():
            raise ProblemError(
                f"{self.name}: weight {tuple(w.shape)} and moment {tuple(psi.shape)} must be (rows, columns) and "
                f"(columns, columns), or both with a leading group dimension."
            )
        wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
        if tuple(psi.shape) != wanted:
            raise ProblemError(f"{self.name}: moment has shape {tuple(psi.shape)}, weight asks for {wanted}.")
        if w.shape[-1] == 0:
            raise ProblemError(f"{self.name}: weight {tuple(w.shape)} has no columns.")
        if not w.is_floating_point() or not psi.is_floating_point():
            raise ProblemError(f"{self.name}: weight and moment must be floating point, not {w.dtype}, {psi.dtype}.")
        for what, tensor in (("weight", w), ("moment", psi)):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise ProblemError(f"{self.name}: {what} has {bad} NaN or infinite entries. Check the network first.")
        if self.curvature is not None and self.curvature.shape != w.shape:
            raise ProblemError(f"{self.name}: curvature has shape {tuple(self.curvature.shape)}, weight {tuple(w.shape)}.")
        self._check_moment()

    def _check_moment(self) -> None:
        psi = self.moment
        if psi.numel() == 0:
            return
        largest = float(psi.abs().amax())
        if float(psi.diagonal(dim1=-2, dim2=-1).min()) < 0:
            raise ProblemError(f"{self.name}: Ψ has a negative diagonal; it must be a mean of outer products.")
        if float((psi - psi.mT).abs().amax()) > 1e-4 * largest:
            raise ProblemError(f"{self.name}: Ψ is not symmetric. Pass Y Yᵀ / n.")

    @property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, moment) of every group; one pair for an ungrouped layer."""
        if self.weight.dim() == 2:
            return [(self.weight, self.moment)]
        return list(zip(self.weight, self.moment, strict=True))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Every group's moment made ready for solving; factorised once, whoever asks."""
        return tuple(self.damped_metrics())

    def damped_metrics(self, first: float = 0.0) -> list[Metric]:
        """The same with damping that starts from `first` where a moment is singular."""
        return [metric(psi, self.damping, first=first, name=self.name, samples=self.samples) for _, psi in self.groups]

    @property
    def protected(self) -> int:
        """How many trailing columns may not be removed: 1 with a bias column, else 0."""
        return int(self.bias_column)

    @property
    def prunable(self) -> int:
        """How many weights may be removed."""
        return self.weight.numel() - self.protected * self.weight[..., 0].numel()

    @property
    def energy(self) -> float:
        """Mean squared output of the dense layer, tr(W Ψ Wᵀ)."""
        return self._quadratic(self.weight.to(torch.float64))

    def error_of(self, weight: Tensor) -> float:
        """E of any replacement weight, in float64."""
        return self._quadratic(weight.to(torch.float64) - self.weight.to(torch.float64))

    def largest_error_of(self, weight: Tensor) -> float:
        """E plus what rounding may have hidden, because Ψ is a sum of float32 products: for bounds, which must hold.

        Entries of Ψ are right to 1e-6 · √(Ψ_ii Ψ_jj), measured; so E is right to 1e-6 · Σ_rows (Σ_i |δ_i| √Ψ_ii)².
        """
        delta = (weight.to(torch.float64) - self.weight.to(torch.float64)).abs()
        size = self.moment.to(torch.float64).diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt().unsqueeze(-1)
        return self.error_of(weight) + 1e-6 * float((delta @ size).square().sum())

    def _quadratic(self, delta: Tensor) -> float:
        return float(((delta @ self.moment.to(torch.float64)) * delta).sum().clamp_min(0.0))


@dataclass(frozen=True, eq=False)
class Solution:
    """A sparse replacement for one layer's weights.

    `mask` is True where a weight was kept, and always so in the bias column. `error` is E recomputed from Ψ for these very
    weights, never accumulated. `curve[k]` is the error with k weights removed, for solvers that know it: it is
    measured with the damping, so `curve[removed] = error + damping · ‖V − W‖²`.
    """

    weight: Tensor
    mask: Tensor
    error: float
    energy: float
    removed: int
    prunable: int
    damping: float = 0.0
    curve: Tensor | None = field(default=None, repr=False)
    status: str = "ok"

    @property
    def kept(self) -> int:
        """How many prunable weights are left."""
        return self.prunable - self.removed

    @property
    def relative_error(self) -> float:
        """√E over the norm of the dense output; 0 where that output is 0 and nothing moved."""
        if self.energy == 0:
            return 0.0 if self.error == 0 else float("inf")
        return math.sqrt(self.error / self.energy)

    @property
    def losses(self) -> Tensor | None:
        """What each deletion that was made cost, in order; their sum is `curve[removed]`."""
        return None if self.curve is None else self.curve[: self.removed + 1].diff()


@runtime_checkable
class Solver(Protocol):
    """Anything that turns a problem and a target into a solution.

    `needs` names the optional parts of a `Problem` it cannot do without.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Names of optional `Problem` fields that must be present."""
        ...

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve."""
        ...


def finish(problem: Problem, weight: Tensor, mask: Tensor, *, damping: float = 0.0, curve: Tensor | None = None) -> Solution:
    """Round a solver's float64 weights to the layer's type, apply the mask, recompute the error from those bits."""
    final = torch.where(mask, weight, torch.zeros_like(weight)).to(problem.weight.dtype)
    return Solution(
        weight=final,
        mask=mask,
        error=problem.error_of(final),
        energy=problem.energy,
        removed=int((~mask).sum()),
        prunable=problem.prunable,
        damping=damping,
        curve=curve,
    )


def choose_count(problem: Problem, target: Target, error_at: Callable[[int], float]) -> int:
    """How many weights to remove: by fraction directly, by error the most whose error stays within the limit.

    The search assumes that `error_at` grows with the count, as it does for `exact`. For the others it grows in all but
    noise; the count found then satisfies the limit, though a larger one might too.
    """
    match target:
        case Sparsity():
            return target.count(problem.prunable)
        case ErrorBudget():
            limit = target.limit(problem.energy)
            low, high = 0, problem.prunable
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if error_at(middle) <= limit else (low, middle - 1)
            return low
