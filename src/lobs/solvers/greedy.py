"""Exact greedy OBS: the inverse is downdated after every deletion, so every loss is the true one.

Rows are independent given Ψ: each yields an order of deletion and a loss per step. A running
maximum makes a row's losses monotone without changing which weight a layer-wide greedy would take
next; one sort across rows then gives the layer's mask at *any* count, and the running sum of losses
its error there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lobs._system.distributed import process_group
from lobs.solvers import kernels
from lobs.solvers.least_squares import on_support, sweep_dtype
from lobs.solvers.masks import mask_from_order, removal_order
from lobs.solvers.metric import Metric
from lobs.solvers.patterns.block import solve_blocks
from lobs.solvers.patterns.nbym import solve_nbym
from lobs.solvers.patterns.structured import solve_structured
from lobs.solvers.problem import Problem, choose_count
from lobs.solvers.solution import Solution
from lobs.targets import Block, ErrorBudget, NByM, Structured, Target


@dataclass(frozen=True, eq=False)
class DeletionPath:
    """A whole run of the exact solver: any number of weights can be cut from it without solving again.

    `columns[g, r, t]` is the t-th column that row r of group g loses, `losses` what that costs.
    Memory is 12 bytes a weight. The problem's `row_weight` says in which order rows give; curve and
    error stay plain.
    """

    problem: Problem
    metrics: tuple[Metric, ...]
    columns: Tensor
    losses: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """What decides who goes first, in the shape of `losses`: never falling along a row."""
        return self.losses.cummax(dim=-1).values * self.problem.importance.to(
            self.losses
        ).unsqueeze(-1)

    @cached_property
    def _ranking(self) -> Tensor:
        # Stable, and rows hold their steps in order: ties within a row keep that order, so a cut is
        # a prefix of every row.
        return removal_order(self.keys)

    @cached_property
    def curve(self) -> Tensor:
        """Error with k weights removed, for k = 0 … all."""
        return torch.cat([self.losses.new_zeros(1), self.losses.flatten()[self._ranking].cumsum(0)])

    @property
    def damping(self) -> float:
        """Largest λ that any group needed."""
        return max(m.damping for m in self.metrics)

    def mask_at(self, count: int) -> Tensor:
        """The mask with `count` weights removed, in the weight's shape."""
        kept = mask_from_order(self._ranking, count, tuple(self.losses.shape))
        weight = self.problem.weight
        mask = torch.ones(
            (len(self.metrics), *weight.shape[-2:]), dtype=torch.bool, device=weight.device
        )
        mask.scatter_(-1, self.columns.long(), kept)
        return mask.view(weight.shape)

    def cut(self, count: int) -> Solution:
        """Solve for the weights with `count` of them removed: least squares on the support, row by row."""
        return replace(on_support(self.problem, self.mask_at(count)), curve=self.curve)

    def solve(self, target: Target) -> Solution:
        """Cut where a target says."""
        count = choose_count(self.problem, target, lambda k: float(self.curve[k]))
        solution = self.cut(count)
        if isinstance(target, ErrorBudget):
            if float(self.curve[count]) > 1.01 * solution.error and self.damping > 0:
                # The curve holds what damping adds, which is no error of the layer's.
                step = max(1, self.problem.prunable // 1000)
                count = max(
                    count,
                    choose_count(self.problem, target, lambda k: self.cut(k).error, step=step),
                )
                solution = self.cut(count)
            # The curve is a sum in the sweep's precision: where it was a hair too kind, give
            # weights back.
            while solution.error > target.limit(self.problem.energy) and count > 0:
                count -= max(1, count // 1000)
                solution = self.cut(count)
        return solution


@dataclass(frozen=True)
class GreedyOBS:
    """Greedy OBS with a downdated inverse, layer-wide selection and the whole error curve from one run.

    Time rows·d³/3 multiply-adds whatever the target, memory d² a thread plus 12 bytes a weight.
    Optimal on its support. Sweeps in float32 where Ψ is well-conditioned and the weights are not
    float64; everything else is float64.
    """

    backend: kernels.Backend = "auto"
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    @staticmethod
    def bytes(rows: int, columns: int) -> int:
        """What a sweep takes beside the moment: an inverse and a copy of it a thread, orders and losses."""
        return 8 * (1 + torch.get_num_threads()) * columns**2 + 12 * rows * columns

    def path(self, problem: Problem) -> DeletionPath:
        """Run to the end: order and losses of every deletion."""
        columns, losses = [], []
        for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
            order, loss = self._sweep(metric, weight, problem.protected, problem.name)
            columns.append(order)
            losses.append(loss)
        return DeletionPath(problem, problem.metrics, torch.stack(columns), torch.stack(losses))

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class. Patterns have ways of their own."""
        match target:
            case NByM():
                return solve_nbym(problem, target, backend=self.backend)
            case Block():
                return solve_blocks(problem, target)
            case Structured():
                return solve_structured(problem, target)
        return self.path(problem).solve(target)

    def _sweep(
        self, metric: Metric, weight: Tensor, protected: int, name: str
    ) -> tuple[Tensor, Tensor]:
        d = weight.shape[-1]
        # Kernels want the protected columns first; the bias stands last.
        to_front = torch.arange(d, device=weight.device).roll(protected)
        inverse = metric.inverse[to_front][:, to_front].to(sweep_dtype(metric, weight))
        scaled = metric.scaled(weight)[:, to_front]
        group, rows = process_group(), len(scaled)
        part = scaled if group.size == 1 else scaled[group.shared_rows(rows)]
        order, losses = kernels.greedy(
            inverse, part, protected, backend=self.backend, label=f"exact {name}"
        )
        if group.size > 1:  # rows are independent of each other
            order, losses = group.gathered_rows((order, losses), rows)
        return to_front[order.long()].to(torch.int32), losses
