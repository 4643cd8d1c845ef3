"""Alternating directions with a hard count: a good support for the price of 56 matrix products.

min ½ tr((X−W) G (X−W)ᵀ) subject to X = V, V with so many zeros: X = (WG + ρ(V−U))(G + ρI)⁻¹, V =
the largest of X + U, U ← X + U − V, with a penalty ρ that grows until the support stands still (the
idea of ALPS, Meng et al. 2024). Two things differ:

- **Units.** What is large depends on the units that a column's weights are given in. Columns of
  equal energy, as usual, make a weight as important as its share of the output. But what its
  removal costs, once the others have made good what they can, is w² times the share of the column's
  energy that the other columns kept cannot explain. So units are those in which this independence
  is the same for all columns, looked at on some rows' supports: first by size, then as they have
  become. The first ρ goes by its mean. That alone takes up to a fifth off the error of real layers
  (`benchmarks/admm_units.py`).
- Few values of ρ with one Cholesky each instead of an eigendecomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lobs._system import memory
from lobs.errors import SolverError
from lobs.solvers import linalg
from lobs.solvers.least_squares import on_support, stacked, typical_independence
from lobs.solvers.masks import mask_from_order, removal_order
from lobs.solvers.problem import Problem, choose_count
from lobs.solvers.solution import Solution
from lobs.targets import Target

_SAMPLE = (
    100_000  # weights that a threshold is taken from: enough for a hundredth of those kept at 95 %
)
_TYPICAL, _AGAIN = 2, 2  # so many rows stand for all; the penalty at which they are looked at again
_PENALTY, _LEAST, _MOST = (
    0.25,
    0.004,
    0.08,
)  # first ρ: a share of the mean independence, within limits


@dataclass(frozen=True)
class ADMM:
    """Alternating directions, then least squares on the support found.

    Time `penalties` · (d³ + `steps` · rows·d²) multiply-adds, memory of two d×d matrices and seven
    copies of the weight. By ε it searches the count, about a dozen runs. Runs in float32 unless the
    weights are float64. `penalty` is the first one; by default it goes by how independent the
    columns are. `units` are those of equal cost or, as usual elsewhere, equal energy.
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
                f"{self!r}: penalty must be positive, growth over 1, penalties and steps at least "
                "1."
            )
        if self.units not in ("cost", "energy"):
            raise SolverError(f"{self!r}: units are 'cost' or 'energy'.")

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        count = choose_count(
            problem,
            target,
            lambda k: self.at(problem, k).error,
            step=max(1, problem.prunable // 1000),
        )
        return self.at(problem, count)

    @staticmethod
    def bytes(rows: int, columns: int) -> int:
        """What a wide layer takes with the swaps that follow, where a second d×d matrix does not fit."""
        return 4 * columns**2 + 40 * rows * columns

    def at(self, problem: Problem, count: int) -> Solution:
        """Remove exactly `count` weights."""
        mask, _ = self.support(problem, count)
        return on_support(problem, mask)

    def support(self, problem: Problem, count: int) -> tuple[Tensor, Tensor]:
        """Which weights to keep when `count` go, in the weight's shape, and weights near its best, as `swap` wants them."""
        gram, w, importance = _posed(problem)
        x, units = self.alternate(gram, w, lambda values: _above(values, count, problem.protected))
        order = removal_order(x.abs(), problem.protected)
        mask = mask_from_order(order, count, tuple(w.shape))
        scale = (importance * units).clamp_min(torch.finfo(w.dtype).tiny)
        return mask.view(problem.weight.shape), torch.where(mask, x, 0.0) / scale

    def alternate(
        self, gram: Tensor, w: Tensor, largest: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The last X + U, whose `largest` are the weights to keep, and the units of its columns.

        `gram` is (groups, d, d), `w` (groups, rows, d); `largest` gives the mask of those that a
        pattern or a count leaves.
        """
        pull = w @ gram
        keep = before = largest(w)
        even = units = w.new_ones(len(w), 1, w.shape[-1])
        v = x = w
        dual, rho = torch.zeros_like(w), 0.0
        with memory.scratch(gram) as fresh:
            for turn in range(self.penalties):
                matrix = fresh()
                if turn == 0 or (turn == _AGAIN and self.units == "cost"):
                    independence = typical_independence(matrix, keep, _TYPICAL)
                    change = (_equal(independence) if self.units == "cost" else even) / units
                    units, v, dual = units * change, v * change, dual * change
                    wanted = pull / units
                if turn == 0:
                    rho = self.penalty or min(
                        _MOST, max(_LEAST, _PENALTY * float(independence.log().mean().exp()))
                    )
                inverse = linalg.try_ridge_inverse(matrix.div_(units).div_(units.mT), rho)
                if (
                    inverse is None
                    # units so far apart that these digits do not hold the matrix: equal energy always
                    # does
                ):
                    v, dual, wanted, units = v / units, dual / units, pull, even
                    del matrix
                    matrix = fresh()
                    inverse = linalg.ridge_inverse(matrix, rho, overwrite=True)
                for _ in range(self.steps):
                    x = dual.add_(torch.sub(v, dual).mul_(rho).add_(wanted) @ inverse)
                    keep = largest(x)
                    v = x * keep
                    dual = x - v
                if turn and int((keep ^ before).sum()) <= 1e-4 * keep.numel():
                    break
                before, dual, rho = keep, dual / self.growth, rho * self.growth
                del inverse, matrix
        return x, units


def first_independence(problem: Problem, count: int) -> Tensor:
    """About how independent columns are on supports of the largest weights when `count` go, (groups, d)."""
    gram, w, _ = _posed(problem)
    return typical_independence(gram, _above(w, count, problem.protected), 1)


def _posed(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Moments, weights as important as their rows, and by what these were multiplied for that."""
    gram, w = stacked(problem)
    importance = problem.importance.to(w).sqrt().unsqueeze(-1)
    return gram, w * importance, importance


def _equal(independence: Tensor) -> Tensor:
    """What columns of equal energy are multiplied with to become columns of equal cost, (groups, 1, d)."""
    logs = independence.log()
    return ((logs - logs.mean(dim=-1, keepdim=True)) / 2).exp().unsqueeze(-2)


def _above(x: Tensor, count: int, protected: int) -> Tensor:
    """Roughly the largest entries: a threshold from a sample, ties and all; exact counts matter only in the end."""
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
    """Every so-manieth value, in steps that come by every column: a step that divides their number would see only some."""
    step = -(-len(values) // _SAMPLE)
    while math.gcd(step, columns) > 1:
        step += 1
    return values[::step]


def _smallest(values: Tensor, count: int) -> float:
    """The count-th smallest value; on the CPU a partial sort by numpy is five times faster than torch's."""
    if values.device.type != "cpu":
        return float(values.kthvalue(count).values)
    return float(np.partition(values.numpy(), count - 1)[count - 1])
