"""Improve any solver's solution: swaps on its support, then least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lobs.errors import SolverError
from lobs.solvers.admm import ADMM
from lobs.solvers.column_sweep import ColumnSweep
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.least_squares import on_support, weighted_error
from lobs.solvers.local_search import swap
from lobs.solvers.patterns import pattern_solver
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.solution import Solution, finish
from lobs.targets import Pattern, Target


@dataclass(frozen=True)
class Refine:
    """Improve the inner solver's support and solve for the best weights on it.

    The result is never worse than the inner solver's. By ε the inner solver meets the budget first,
    so the refined error is below the limit.

    Args:
        inner: the solver whose solution is improved.
        swaps: exchange weights, one in and one out, until no exchange helps
            (`solvers.local_search`). Without swaps only the values change, and no row gets worse.
        rounds: largest number of rounds of swaps.
        swap_seconds: time after which no further swaps are tried; None for no limit.
    """

    inner: Solver
    swaps: bool = True
    rounds: int = 3
    swap_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or (self.swap_seconds is not None and not self.swap_seconds >= 0):
            raise SolverError(f"{self!r}: rounds must be at least 1, swap_seconds not negative.")

    @property
    def needs(self) -> frozenset[str]:
        """Optional `Problem` fields that the inner solver needs."""
        return self.inner.needs

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time, taking the inner solver's for that of ADMM."""
        return search_seconds(shape)

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        return shape.solving_bytes

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the improved solution of the inner solver."""
        found = self.inner(problem, target)
        if isinstance(target, Pattern):  # a free swap would break it
            return _same_support(problem, found)
        return self.improve(problem, found)

    def improve(self, problem: Problem, found: Solution) -> Solution:
        """Return an improved solution, with as many weights removed."""
        if not self.swaps:
            return _same_support(problem, found)
        done = swap(problem, found.mask, rounds=self.rounds, seconds=self.swap_seconds)
        better = on_support(problem, done.mask, done.values)
        # Rows trade by importance, so the plain error may rise while the weighted one falls.
        improved = weighted_error(problem, better.weight) <= weighted_error(problem, found.weight)
        # Rounding may differ between processors, so the first process decides for all.
        if problem.context.group.all_gather(improved)[0]:
            return better
        return _same_support(problem, found)


def search_seconds(shape: ProblemShape) -> float:
    """Estimate the time of a support by ADMM with swaps and least squares, or of the pattern."""
    if isinstance(shape.target, Pattern):
        return pattern_solver(shape.target).seconds(shape)
    if not shape.context.affords(ADMM().search_bytes(shape)):
        return ColumnSweep().seconds(shape)
    return 2 * ADMM().seconds(shape) + COSTS.group * shape.groups


def _same_support(problem: Problem, found: Solution) -> Solution:
    after = on_support(problem, found.mask)
    # With damping, the optimum can be slightly worse in Ψ itself. Such a row keeps its weights.
    better = problem.row_errors_of(after.weight) <= problem.row_errors_of(found.weight)
    weight = torch.where(better.view(*problem.weight.shape[:-1], 1), after.weight, found.weight)
    return finish(
        problem, weight.to(torch.float64), found.mask, damping=max(found.damping, after.damping)
    )
