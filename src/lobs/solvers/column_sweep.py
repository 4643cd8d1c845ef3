"""One pass over the columns in an order that all rows share: the fastest way for wide layers.

One factor U of Ψ⁻¹ serves all rows. Its j-th row tells how the columns after j compensate for the
loss of column j (the idea of SparseGPT, Frantar and Alistarh 2023). A block of columns at a time
loses its cheapest weights. Then one product updates the rest of the matrix. Under an N:M pattern
every group chooses its weights when the pass reaches it. The pass never goes back, so its weights
are not optimal on their support. Least squares gives those, or a few steps of conjugate gradients
on layers too wide for that.

Time is 4d³/3 for the factor and (1 + `steps`)·rows·d² multiply-adds. Memory is one d×d matrix, in
place of Ψ where both do not fit, and a strip of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lobs._system.progress import track
from lobs.errors import SolverError
from lobs.solvers import linalg
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.least_squares import approach_least_squares, on_support, sweep_dtype
from lobs.solvers.metric import Metric
from lobs.solvers.patterns import ColumnChoice, pattern_solver
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, choose_count, finish
from lobs.targets import Pattern, Target

_STRIP = 2**23  # entries of the rows that pass through the columns together


@dataclass(frozen=True)
class ColumnSweep:
    """A pass over the columns in a shared order, then least squares on the support found.

    Args:
        block: columns that lose their cheapest weights together.
        ridge: addition to Ψ's diagonal, relative to it. Without it the pass follows noise.
        steps: steps of conjugate gradients where there is no least squares.
        exact: end with least squares, except on layers too wide for it.
        needs: optional `Problem` fields that must be present: none.
    """

    block: int = 128
    ridge: float = 0.01
    steps: int = 10
    exact: bool = True
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not (self.block >= 1 and self.ridge > 0 and self.steps >= 0):
            raise SolverError(
                f"{self!r}: block must be at least 1, ridge positive, steps not negative."
            )

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time of one pass on two cores."""
        d, rows = shape.columns, shape.groups * shape.rows
        factor = COSTS.factor * shape.groups * d**3 * 4 / 3
        return (factor + COSTS.product * (1 + self.steps) * rows * d**2) / 1e9

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        if shape.single_copy:  # the moment, and weights and mask in single precision
            return 4 * shape.columns**2 + 9 * shape.weights
        return shape.solving_bytes

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        if isinstance(target, Pattern) and (choose := pattern_solver(target).column_choice):
            found = self._solve(*choose(problem, target))
            return replace(found, status=f"ok ({target} by columns)")
        count = choose_count(
            problem,
            target,
            lambda k: self.at(problem, k).error,
            step=max(1, problem.prunable // 1000),
        )
        return self.at(problem, count)

    def at(self, problem: Problem, count: int) -> Solution:
        """Return the solution with exactly `count` weights removed."""
        return self._solve(problem, _ByCount(count, problem.prunable, self.block))

    def _solve(self, problem: Problem, choice: ColumnChoice) -> Solution:
        """Return the solution whose support `choice` makes."""
        shape = (len(problem.metrics), *problem.weight.shape[-2:])
        out = torch.empty(shape, dtype=problem.weight.dtype, device=problem.weight.device)
        mask = torch.ones(shape, dtype=torch.bool, device=out.device)
        for g in range(len(problem.metrics)):
            self._group(problem, g, choice, mask[g], out[g])
        mask, out = mask.view(problem.weight.shape), out.view(problem.weight.shape)
        if problem.ridge or not self.exact:  # too large for least squares in float64
            return finish(problem, out, mask, damping=max(m.damping for m in problem.metrics))
        near = torch.stack(
            [m.scaled(w) for m, w in zip(problem.metrics, out.view(shape), strict=True)]
        )
        return on_support(problem, mask, near)

    def _group(
        self, problem: Problem, g: int, choice: ColumnChoice, mask: Tensor, out: Tensor
    ) -> None:
        """Solve group `g` into `mask` and `out`."""
        metric, weight = problem.metrics[g], problem.groups[g][0]
        importance, free = problem.importance[g], weight.shape[-1] - problem.protected
        gram = metric.gram.to(sweep_dtype(metric, weight))
        strips = _strips(weight)
        with (
            problem.context.scratch(gram) as fresh,
            track(f"columns {problem.name}", len(strips)) as advance,
        ):
            factor = linalg.upper_factor_of_inverse(fresh(), self.ridge)
            for rows in strips:
                v = metric.scaled(weight[rows]).to(gram)
                self._pass(v, factor, importance[rows].to(v), free, choice, mask[rows])
                out[rows] = metric.unscaled(v, weight[rows], mask[rows]).to(out.dtype)
                advance(1)
            del factor
        if (problem.ridge or not self.exact) and self.steps:
            self._refit(metric, gram, weight, mask, out)

    def _refit(
        self, metric: Metric, gram: Tensor, weight: Tensor, mask: Tensor, out: Tensor
    ) -> None:
        """Improve `out` on its support, in place and strip by strip."""
        for rows in _strips(weight):
            start, wanted = (metric.scaled(w).to(gram) for w in (out[rows], weight[rows]))
            v = approach_least_squares(gram, wanted, mask[rows], start, steps=self.steps)
            out[rows] = metric.unscaled(v, weight[rows], mask[rows]).to(out.dtype)

    def _pass(
        self,
        v: Tensor,
        factor: Tensor,
        importance: Tensor,
        free: int,
        choice: ColumnChoice,
        mask: Tensor,
    ) -> None:
        """Take a strip of rows, in equilibrated units, through all columns, in place."""
        pivot, step = factor.diagonal(), choice.step
        block = max(step, self.block // step * step)  # whole steps
        for left in range(0, free, block):
            right = min(free, left + block)
            here = v[:, left:right]  # a view of v
            owed = torch.zeros_like(here)
            for j in range(right - left):
                if j % step == 0:
                    end = min(right, left + j + step)
                    cost = (v[:, left + j : end] / pivot[left + j : end]).square()
                    mask[:, left + j : end] = choice.kept(cost * importance.unsqueeze(1))
                owed[:, j] = torch.where(mask[:, left + j], 0.0, here[:, j] / pivot[left + j])
                here[:, j:] -= owed[:, j, None] * factor[left + j, left + j : right]
            v[:, right:] -= owed @ factor[left:right, right:]
        v.masked_fill_(~mask, 0.0)


@dataclass
class _ByCount:
    """`count` removals of `total` weights, dealt in proportion and exact in sum."""

    count: int
    total: int
    step: int
    seen: int = 0
    taken: int = 0

    def kept(self, cost: Tensor) -> Tensor:
        """Return False at the cheapest of the next weights."""
        gone = cost.flatten().argsort(stable=True)[: self._take(cost.numel())]
        kept = torch.ones_like(cost, dtype=torch.bool).flatten()
        return kept.index_fill_(0, gone, False).view_as(cost)

    def _take(self, size: int) -> int:
        """Return how many of the next `size` weights go."""
        self.seen += size
        now = self.count * self.seen // max(1, self.total) - self.taken
        self.taken += now
        return now


def _strips(weight: Tensor) -> list[slice]:
    step = max(1, _STRIP // weight.shape[1])
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]
