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


@dataclass(frozen=True, eq=False)
class Reader:
    """Hold a layer that reads sets of columns.

    Args:
        problem: its problem, of one group.
        columns: the columns of each set, (sets, columns).
        importance: what an error of each row counts for.
    """

    problem: Problem
    columns: Tensor
    importance: Tensor

    @property
    def weight(self) -> Tensor:
        """Return the weights in equilibrated units, with rows scaled by their importance."""
        (metric,), ((weight, _),) = self.problem.metrics, self.problem.groups
        rows = self.importance.to(weight.device).sqrt().unsqueeze(1)
        return metric.scaled(weight).to(torch.float64) * rows


def cheapest_sets(readers: Sequence[Reader], count: int) -> Tensor:
    """Return which sets of columns cost least when all rows of all readers lose them.

    From one reader of moderate width group OBS removes them: each set at its cost after those
    before it. Otherwise costs are those of losing one set alone, relative to each layer's output.

    Args:
        readers: the layers that read the sets.
        count: how many sets go.
    """
    if len(readers) == 1 and readers[0].problem.weight.shape[-1] <= _GREEDY_COLUMNS:
        return _greedy_sets(readers[0], count)
    total = torch.zeros(len(readers[0].columns), dtype=torch.float64)
    for reader in readers:
        columns, weight = reader.columns, reader.weight
        inverse = reader.problem.metrics[0].inverse
        tiles = inverse[columns.unsqueeze(2), columns.unsqueeze(1)].to(torch.float64)
        costs = linalg.block_costs(tiles, weight[:, columns].transpose(0, 1)).cpu()
        total += costs / costs.sum().clamp_min(1e-300)
    return total.argsort(stable=True)[:count]


def _greedy_sets(reader: Reader, count: int) -> Tensor:
    """Return the first sets that group OBS removes."""
    weight, own = reader.weight, reader.columns.flatten()
    rest = torch.ones(weight.shape[1], dtype=torch.bool)
    rest[own] = False
    place = torch.cat([own, rest.nonzero().squeeze(1)]).to(weight.device)
    inverse = reader.problem.metrics[0].inverse.to(torch.float64)[place][:, place]
    sets, wide = reader.columns.shape
    order, _ = greedy_blocks(inverse, weight[:, place].unsqueeze(0), sets, wide, count)
    return order[0].cpu()


def _seconds(shape: ProblemShape) -> float:
    """Estimate the time: rows share one support, so few factorisations are needed."""
    return COSTS.factor * shape.groups * shape.columns**3 / 3e9


SOLVER = PatternSolver(solve_chosen, _seconds, mask_by_score=lambda p, t, _: _mask(p, t))
