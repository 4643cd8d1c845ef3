"""Greedy OBS with exact losses: the inverse is downdated after every deletion.

Rows are independent given Ψ: each yields an order of deletion and a loss per step. A running
maximum makes a row's losses monotone. It does not change which weight a layer-wide greedy would
take next. One sort across rows then gives the layer's mask at *any* count, and the running sum of
losses its error there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lobs.solvers import kernels
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.least_squares import on_support, sweep_dtype
from lobs.solvers.linalg import is_narrow
from lobs.solvers.metric import Metric
from lobs.solvers.patterns import pattern_solver
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, choose_count, mask_from_order, removal_order
from lobs.solvers.together import greedy_together
from lobs.targets import ErrorBudget, Pattern, Target


@dataclass(frozen=True, eq=False)
class DeletionPath:
    """A whole run of the greedy, from which any number of weights can be cut without solving again.

    Memory is 12 bytes per weight. The problem's `row_weight` decides the order among rows. The
    curve and the errors are unweighted.

    Args:
        problem: the layer problem.
        metrics: the prepared moments of all groups.
        columns: `columns[g, r, t]` is the t-th column that row r of group g loses.
        losses: the cost of each of these deletions.
    """

    problem: Problem
    metrics: tuple[Metric, ...]
    columns: Tensor
    losses: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """Sort keys in the shape of `losses`, never falling along a row: the lowest goes first."""
        importance = self.problem.importance.to(self.losses).unsqueeze(-1)
        return self.losses.cummax(dim=-1).values * importance

    @cached_property
    def _ranking(self) -> Tensor:
        # The sort is stable and rows hold their steps in order, so a cut is a prefix of every row.
        return removal_order(self.keys)

    @cached_property
    def curve(self) -> Tensor:
        """The error with k weights removed, for k = 0 … all."""
        return torch.cat([self.losses.new_zeros(1), self.losses.flatten()[self._ranking].cumsum(0)])

    @property
    def damping(self) -> float:
        """Largest λ of any group."""
        return max(m.damping for m in self.metrics)

    def mask_at(self, count: int) -> Tensor:
        """Return the mask with `count` weights removed, in the weight's shape."""
        kept = mask_from_order(self._ranking, count, tuple(self.losses.shape))
        weight = self.problem.weight
        mask = torch.ones(
            (len(self.metrics), *weight.shape[-2:]), dtype=torch.bool, device=weight.device
        )
        mask.scatter_(-1, self.columns.long(), kept)
        return mask.view(weight.shape)

    def cut(self, count: int) -> Solution:
        """Remove `count` weights and solve least squares on the support."""
        return replace(on_support(self.problem, self.mask_at(count)), curve=self.curve)

    def solve(self, target: Target) -> Solution:
        """Cut at the count of a `Sparsity` or `ErrorBudget`."""
        count = choose_count(self.problem, target, lambda k: float(self.curve[k]))
        solution = self.cut(count)
        if isinstance(target, ErrorBudget):
            if float(self.curve[count]) > 1.01 * solution.error and self.damping > 0:
                # The curve includes the damping, which is not part of the layer's error.
                step = max(1, self.problem.prunable // 1000)
                count = max(
                    count,
                    choose_count(self.problem, target, lambda k: self.cut(k).error, step=step),
                )
                solution = self.cut(count)
            # The curve is a sum in the sweep's precision. Where it was too low, keep more weights.
            while solution.error > target.limit(self.problem.energy) and count > 0:
                count -= max(1, count // 1000)
                solution = self.cut(count)
        return solution


@dataclass(frozen=True)
class GreedyOBS:
    """Greedy OBS with a downdated inverse; one run gives the whole error curve.

    Takes rows·d³/3 multiply-adds for any target, and memory of d² per thread plus 12 bytes per
    weight. The weights are optimal on their support. It sweeps in float32 where Ψ is
    well-conditioned and the weights are not float64. Everything else is float64.
    """

    backend: kernels.Backend = "auto"
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time of a sweep, or of the pattern's own solver, on two cores."""
        if isinstance(shape.target, Pattern):
            return pattern_solver(shape.target).seconds(shape)
        return COSTS.greedy * (shape.groups * shape.rows) * shape.columns**3 / 3e9

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        return shape.solving_bytes

    def search_bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of a sweep beside the moment: inverses, orders and losses."""
        inverses = 1 + torch.get_num_threads()
        return 8 * inverses * shape.columns**2 + 12 * shape.rows * shape.columns

    def path(self, problem: Problem) -> DeletionPath:
        """Delete all weights and return the order and loss of every deletion."""
        columns, losses = [], []
        shape = len(problem.metrics), *problem.weight.shape[-2:]
        if is_narrow(*shape):
            inverses = torch.stack([metric.inverse for metric in problem.metrics])
            scales = torch.stack([metric.scale for metric in problem.metrics]).unsqueeze(1)
            scaled = problem.weight.view(shape).to(scales) * scales
            order, loss = greedy_together(inverses, scaled, problem.protected)
            return DeletionPath(problem, problem.metrics, order, loss)
        for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
            order, loss = self._sweep(problem, metric, weight)
            columns.append(order)
            losses.append(loss)
        return DeletionPath(problem, problem.metrics, torch.stack(columns), torch.stack(losses))

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution; patterns go to their own solvers."""
        if isinstance(target, Pattern):
            return pattern_solver(target).solve(problem, target, self.backend)
        return self.path(problem).solve(target)

    def _sweep(self, problem: Problem, metric: Metric, weight: Tensor) -> tuple[Tensor, Tensor]:
        d, protected = weight.shape[-1], problem.protected
        # The kernels expect protected columns first; the bias column is last.
        to_front = torch.arange(d, device=weight.device).roll(protected)
        inverse = metric.inverse[to_front][:, to_front].to(sweep_dtype(metric, weight))
        scaled = metric.scaled(weight)[:, to_front]
        group = problem.context.group
        part = scaled if group.size == 1 else scaled[group.shared_rows(len(scaled))]
        order, losses = kernels.greedy(
            inverse, part, protected, backend=self.backend, label=f"greedy {problem.name}"
        )
        if group.size > 1:
            order, losses = group.gathered_rows((order, losses), len(scaled))
        return to_front[order.long()].to(torch.int32), losses
