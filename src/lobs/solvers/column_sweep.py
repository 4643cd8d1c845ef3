"""One pass over the columns, in an order that all rows share: the quickest way to prune a wide layer, and the leanest.

One factor U of Ψ⁻¹ serves all rows: its j-th line says how the columns after j make up for the loss
of column j (the idea of SparseGPT, Frantar and Alistarh 2023). A block of columns at a time loses
its cheapest weights, then the rest of the matrix is brought up to date by one product. The pass
cannot go back, so its weights are not the best on their support: those come from least squares, or
on layers too wide for that from some steps of conjugate gradients. Time 4d³/3 for the factor and (1
+ `steps`)·rows·d² multiply-adds; memory one d×d matrix, in place of Ψ where there is no room beside
it, and some rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lobs._system import memory
from lobs._system.progress import track
from lobs.errors import SolverError
from lobs.solvers import linalg
from lobs.solvers.least_squares import on_support, sweep_dtype
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem, choose_count, finish
from lobs.solvers.solution import Solution
from lobs.targets import Target

_ROWS_AT_A_TIME = 2**23  # elements of the rows that go through the columns together


@dataclass(frozen=True)
class ColumnSweep:
    """The shared-order pass over columns, then `steps` of conjugate gradients on the support found.

    `ridge` is what Ψ's diagonal gets, relative to itself: without it the pass follows noise.
    """

    block: int = 128
    ridge: float = 0.01
    steps: int = 10
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not (self.block >= 1 and self.ridge > 0 and self.steps >= 0):
            raise SolverError(
                f"{self!r}: block must be at least 1, ridge positive, steps not negative."
            )

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        count = choose_count(
            problem,
            target,
            lambda k: self.at(problem, k).error,
            step=max(1, problem.prunable // 1000),
        )
        return self.at(problem, count)

    def at(self, problem: Problem, count: int) -> Solution:
        """Remove exactly `count` weights."""
        shape = (len(problem.metrics), *problem.weight.shape[-2:])
        out = torch.empty(shape, dtype=problem.weight.dtype, device=problem.weight.device)
        mask = torch.ones(shape, dtype=torch.bool, device=out.device)
        quota = _Quota(count, problem.prunable)
        for g, (metric, (weight, _)) in enumerate(
            zip(problem.metrics, problem.groups, strict=True)
        ):
            self._group(problem, metric, weight, problem.importance[g], quota, mask[g], out[g])
        mask, out = mask.view(problem.weight.shape), out.view(problem.weight.shape)
        if problem.ridge:  # too large for a solution in float64
            return finish(problem, out, mask, damping=max(m.damping for m in problem.metrics))
        near = torch.stack(
            [m.scaled(w) for m, w in zip(problem.metrics, out.view(shape), strict=True)]
        )
        return on_support(problem, mask, near)

    def _group(
        self,
        problem: Problem,
        metric: Metric,
        weight: Tensor,
        importance: Tensor,
        quota: _Quota,
        mask: Tensor,
        out: Tensor,
    ) -> None:
        gram, free = (
            metric.gram.to(sweep_dtype(metric, weight)),
            weight.shape[-1] - problem.protected,
        )
        pieces = _pieces(weight)
        with (
            memory.scratch(gram) as fresh,
            track(f"columns {problem.name}", len(pieces)) as advance,
        ):
            factor = linalg.upper_factor_of_inverse(fresh(), self.ridge)
            for rows in pieces:
                v = metric.scaled(weight[rows]).to(gram)
                self._pass(v, factor, importance[rows].to(v), free, quota, mask[rows])
                out[rows] = metric.unscaled(v, weight[rows], mask[rows]).to(out.dtype)
                advance(1)
            del factor
        if not problem.ridge:
            return
        for rows in pieces if self.steps else ():
            start = metric.scaled(out[rows])
            v = linalg.conjugate_gradients(
                gram, metric.scaled(weight[rows]), mask[rows], start, steps=self.steps
            )
            out[rows] = metric.unscaled(v, weight[rows], mask[rows]).to(out.dtype)

    def _pass(
        self, v: Tensor, factor: Tensor, importance: Tensor, free: int, quota: _Quota, mask: Tensor
    ) -> None:
        """Take some rows, in equilibrated units, from the first column to the last, in place."""
        pivot = factor.diagonal()
        for left in range(0, free, self.block):
            right = min(free, left + self.block)
            cost = (v[:, left:right] / pivot[left:right]).square() * importance.unsqueeze(1)
            gone = cost.flatten().argsort(stable=True)[: quota.take(cost.numel())]
            mask[:, left:right] = (
                torch.ones_like(cost, dtype=torch.bool)
                .flatten()
                .index_fill_(0, gone, False)
                .view_as(cost)
            )
            owed = torch.zeros_like(cost)
            here = v[:, left:right]  # a view: what changes here changes there
            for j in range(right - left):
                owed[:, j] = torch.where(mask[:, left + j], 0.0, here[:, j] / pivot[left + j])
                here[:, j:] -= owed[:, j, None] * factor[left + j, left + j : right]
            v[:, right:] -= owed @ factor[left:right, right:]
        v.masked_fill_(~mask, 0.0)


@dataclass
class _Quota:
    """So many of so many, handed out in proportion and exactly in all."""

    count: int
    total: int
    seen: int = 0
    taken: int = 0

    def take(self, size: int) -> int:
        self.seen += size
        now = self.count * self.seen // max(1, self.total) - self.taken
        self.taken += now
        return now


def _pieces(weight: Tensor) -> list[slice]:
    step = max(1, _ROWS_AT_A_TIME // weight.shape[1])
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]
