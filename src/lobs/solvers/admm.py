"""ADMM with a hard count: a good support for the price of 56 matrix products.

min ½ tr((X−W) G (X−W)ᵀ) subject to X = V, where V has a given number of zeros. The iteration is
X = (WG + ρ(V−U))(G + ρI)⁻¹, V = the largest of X + U, U ← X + U − V. The penalty ρ grows until the
support is stable (the idea of ALPS, Meng et al. 2024). Two things differ:

- **Units.** Which weights are large depends on the units of each column. With columns of equal
  energy, as usual, a weight counts by its share of the output. But after the other columns have
  compensated, its removal costs w² times the share of the column's energy that the kept columns
  cannot explain. So we scale columns to make this share equal. It is measured on the supports of a
  few rows: first by magnitude, then again later. The first ρ follows from its mean. This alone
  lowers the error of real layers by up to a fifth (`benchmarks/admm_units.py`).
- Few values of ρ, with one Cholesky each instead of an eigendecomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lobs._system.context import Context
from lobs.errors import SolverError
from lobs.solvers import linalg
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.least_squares import on_support, stacked, typical_independence
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, choose_count, mask_of_largest
from lobs.targets import Target

_SAMPLE = 100_000  # weights that a threshold is estimated from: 1 % precise at 95 % sparsity
_TYPICAL = 2  # rows whose supports stand for all
_AGAIN = 2  # index of the penalty at which units are measured again
# The first ρ as a share of the mean independence, and its limits.
_PENALTY, _LEAST, _MOST = 0.25, 0.004, 0.08
_STABLE = 1e-4  # share of weights that may change between penalties in a stable support


@dataclass(frozen=True)
class ADMM:
    """ADMM, then least squares on the support found.

    Takes `penalties` · (d³ + `steps` · rows·d²) multiply-adds, and memory of two d×d matrices and
    seven copies of the weight. By ε it searches the count in about a dozen runs. It runs in
    float32 unless the weights are float64.

    Args:
        penalty: the first ρ; by default it follows from how independent the columns are.
        growth: factor between one penalty and the next.
        penalties: number of penalties.
        steps: iterations per penalty.
        units: scale columns to equal "cost" of removal, or to equal "energy" as is usual.
        needs: optional `Problem` fields that must be present: none.
    """

    penalty: float | None = None
    growth: float = 1.6
    penalties: int = 7
    steps: int = 8
    units: Literal["cost", "energy"] = "cost"
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        positive = self.penalty is None or self.penalty > 0
        if not (positive and self.growth > 1 and self.penalties >= 1 and self.steps >= 1):
            raise SolverError(
                f"{self!r}: penalty must be positive, growth over 1, penalties and steps at "
                "least 1."
            )
        if self.units not in ("cost", "energy"):
            raise SolverError(f"{self!r}: units are 'cost' or 'energy'.")

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        count = choose_count(
            problem,
            target,
            lambda k: self.at(problem, k).error,
            step=max(1, problem.prunable // 1000),
        )
        return self.at(problem, count)

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time of the iteration on two cores."""
        d, rows = shape.columns, shape.groups * shape.rows
        factor = COSTS.factor * shape.groups * d**3 / 2
        return self.penalties * (factor + COSTS.product * self.steps * rows * d**2) / 1e9

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        return shape.solving_bytes

    def search_bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of the iteration and of swaps, where one d×d matrix must do."""
        return 4 * shape.columns**2 + 40 * shape.rows * shape.columns

    def at(self, problem: Problem, count: int) -> Solution:
        """Return the solution with exactly `count` weights removed."""
        mask, _ = self.support(problem, count)
        return on_support(problem, mask)

    def support(self, problem: Problem, count: int) -> tuple[Tensor, Tensor]:
        """Return a mask with `count` weights removed, and weights near its best for `swap`."""
        gram, w, importance = _posed(problem)
        x, units = self.alternate(
            gram, w, lambda values: _above(values, count, problem.protected), problem.context
        )
        mask = mask_of_largest(x.abs(), count, problem.protected)
        scale = (importance * units).clamp_min(torch.finfo(w.dtype).tiny)
        return mask.view(problem.weight.shape), torch.where(mask, x, 0.0) / scale

    def alternate(
        self,
        gram: Tensor,
        w: Tensor,
        largest: Callable[[Tensor], Tensor],
        context: Context = Context(),  # noqa: B008 - frozen
    ) -> tuple[Tensor, Tensor]:
        """Return the last X + U, whose `largest` entries are kept, and the units of its columns.

        Args:
            gram: equilibrated moments, (groups, d, d).
            w: equilibrated weights, (groups, rows, d).
            largest: returns the mask of the entries that a count or a pattern keeps.
            context: memory that the iteration may use.
        """
        pull = w @ gram
        keep = before = largest(w)
        even = units = w.new_ones(len(w), 1, w.shape[-1])
        v = x = w
        dual, rho = torch.zeros_like(w), 0.0
        with context.scratch(gram) as fresh:
            for turn in range(self.penalties):
                matrix = fresh()
                if turn == 0 or (turn == _AGAIN and self.units == "cost"):
                    independence = typical_independence(matrix, keep, _TYPICAL)
                    change = (_equal(independence) if self.units == "cost" else even) / units
                    units, v, dual = units * change, v * change, dual * change
                    wanted = pull / units
                if turn == 0:
                    rho = self.penalty or _first_penalty(independence)
                inverse = linalg.try_ridge_inverse(matrix.div_(units).div_(units.mT), rho)
                if inverse is None:  # float32 cannot hold these units; equal energy always works
                    v, dual, wanted, units = v / units, dual / units, pull, even
                    del matrix
                    matrix = fresh()
                    inverse = linalg.ridge_inverse(matrix, rho, overwrite=True)
                for _ in range(self.steps):
                    x = dual.add_(torch.sub(v, dual).mul_(rho).add_(wanted) @ inverse)
                    keep = largest(x)
                    v = x * keep
                    dual = x - v
                if turn and int((keep ^ before).sum()) <= _STABLE * keep.numel():
                    break
                before, dual, rho = keep, dual / self.growth, rho * self.growth
                del inverse, matrix
        return x, units


def _first_penalty(independence: Tensor) -> float:
    return min(_MOST, max(_LEAST, _PENALTY * float(independence.log().mean().exp())))


def first_independence(problem: Problem, count: int) -> Tensor:
    """Estimate how independent columns are on supports of the largest weights, (groups, d)."""
    gram, w, _ = _posed(problem)
    return typical_independence(gram, _above(w, count, problem.protected), 1)


def _posed(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return moments, weights scaled by the root of their rows' importance, and that root."""
    gram, w = stacked(problem)
    importance = problem.importance.to(w).sqrt().unsqueeze(-1)
    return gram, w * importance, importance


def _equal(independence: Tensor) -> Tensor:
    """Return the factors that turn columns of equal energy into columns of equal cost."""
    logs = independence.log()
    return ((logs - logs.mean(dim=-1, keepdim=True)) / 2).exp().unsqueeze(-2)


def _above(x: Tensor, count: int, protected: int) -> Tensor:
    """Return a mask of roughly the largest entries, by a threshold from a sample.

    Exact counts matter only at the end.
    """
    if count == 0:
        return torch.ones_like(x, dtype=torch.bool)
    size = x.abs()
    free = size[..., : size.shape[-1] - protected]
    sample = _sample(free.flatten(), free.shape[-1])
    keep = size > _smallest(sample, max(1, round(count * len(sample) / free.numel())))
    if protected:
        keep[..., -protected:] = True
    return keep


def _sample(values: Tensor, columns: int) -> Tensor:
    """Take a strided sample. The stride is coprime to `columns`, so every column is sampled."""
    step = -(-len(values) // _SAMPLE)
    while math.gcd(step, columns) > 1:
        step += 1
    return values[::step]


def _smallest(values: Tensor, count: int) -> float:
    """Return the count-th smallest value."""
    if values.device.type != "cpu":
        return float(values.kthvalue(count).values)
    # On the CPU numpy's partial sort is five times faster than torch's.
    return float(np.partition(values.numpy(), count - 1)[count - 1])
