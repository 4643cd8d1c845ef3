"""A support that was chosen before, as for units and heads that several layers lose together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lobs.solvers import linalg
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.kernels import Backend
from lobs.solvers.least_squares import on_support
from lobs.solvers.patterns import PatternSolver
from lobs.solvers.patterns.block import greedy_blocks
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution
from lobs.targets import Pattern

_GREEDY_COLUMNS = 4096  # widest layer whose sets are chosen one after another


@dataclass(frozen=True, eq=False)
class Chosen(Pattern):
    """Keep exactly these weights of a layer, and refit them.

    Args:
        kept: True where a weight stays, as (groups, rows, columns) without a bias.
    """

    solved_by: ClassVar[str] = "lobs.solvers.patterns.chosen"
    by_layer: ClassVar[str] = "kept"
    kept: Tensor

    @property
    def table(self) -> Mapping[str, float] | None:
        """Return None: it is one layer's own."""
        return None

    @property
    def removes_everything(self) -> bool:
        """Return whether no weight stays."""
        return not bool(self.kept.any())


def solve_chosen(problem: Problem, target: Chosen, backend: Backend = "auto") -> Solution:
    """Refit the chosen weights.

    Args:
        problem: the layer problem.
        target: the support.
        backend: unused; there is one implementation.
    """
    return on_support(problem, _mask(problem, target))


def _mask(problem: Problem, target: Chosen) -> Tensor:
    mask = torch.ones_like(problem.weight, dtype=torch.bool)
    kept = target.kept.to(mask.device)
    mask.view(len(problem.groups), *mask.shape[-2:])[..., : kept.shape[-1]] = kept
    return mask


def cheapest_sets(problems: Sequence[tuple[Problem, Tensor]], count: int) -> Tensor:
    """Return which sets of columns cost least when all rows of all problems lose them.

    One problem of moderate width is taken apart by group OBS: each set at its cost after those
    before it. Otherwise costs are those of losing one set alone, relative to each layer's output.

    Args:
        problems: layer problems of one group, and the sets in each, (sets, columns of a set).
        count: how many sets go.
    """
    if len(problems) == 1 and problems[0][0].weight.shape[-1] <= _GREEDY_COLUMNS:
        return _greedy_sets(*problems[0], count)
    total = torch.zeros(len(problems[0][1]), dtype=torch.float64)
    for problem, columns in problems:
        (metric,), ((weight, _),) = problem.metrics, problem.groups
        inverse, scaled = metric.inverse, metric.scaled(weight)
        tiles = inverse[columns.unsqueeze(2), columns.unsqueeze(1)].to(torch.float64)
        parts = scaled[:, columns].transpose(0, 1).to(torch.float64)
        total += linalg.block_costs(tiles, parts).cpu() / max(problem.energy, 1e-300)
    return total.argsort(stable=True)[:count]


def _greedy_sets(problem: Problem, columns: Tensor, count: int) -> Tensor:
    """Return the first sets that group OBS removes."""
    (metric,), ((weight, _),) = problem.metrics, problem.groups
    own = columns.flatten()
    rest = torch.ones(weight.shape[1], dtype=torch.bool)
    rest[own] = False
    place = torch.cat([own, rest.nonzero().squeeze(1)]).to(weight.device)
    inverse = metric.inverse.to(torch.float64)[place][:, place]
    scaled = metric.scaled(weight).to(torch.float64)[:, place].unsqueeze(0)
    order, _ = greedy_blocks(inverse, scaled.clone(), *columns.shape, count)
    return order[0].cpu()


def _seconds(shape: ProblemShape) -> float:
    """Estimate the time: rows share one support, so few factorisations are needed."""
    return COSTS.factor * shape.groups * shape.columns**3 / 3e9


SOLVER = PatternSolver(solve_chosen, _seconds, mask_by_score=lambda p, t, _: _mask(p, t))
