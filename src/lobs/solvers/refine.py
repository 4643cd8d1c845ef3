"""Make any solver's answer better: swaps on its support, then least squares on what is left."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lobs._system.distributed import process_group
from lobs.errors import SolverError
from lobs.solvers.least_squares import on_support, weighted_error
from lobs.solvers.local_search import swap
from lobs.solvers.problem import Problem, Solver, finish
from lobs.solvers.solution import Solution
from lobs.targets import Pattern, Target


@dataclass(frozen=True)
class Refine:
    """The inner solver's support made better, with the best weights on it; never worse than the inner solver.

    With `swaps` weights are exchanged, one in and one out, until no exchange helps, `rounds` are
    done or `seconds` are over (`solvers.search`); then least squares on the support. Without, only
    the weights move, and no row gets worse. By ε the inner solver meets the budget first, so the
    refined error is smaller than asked.
    """

    inner: Solver
    swaps: bool = True
    rounds: int = 3
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or (self.seconds is not None and not self.seconds >= 0):
            raise SolverError(f"{self!r}: rounds must be at least 1, seconds not negative.")

    @property
    def needs(self) -> frozenset[str]:
        """What the inner solver needs."""
        return self.inner.needs

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        found = self.inner(problem, target)
        # A free swap would break a pattern.
        return (
            _same_support(problem, found)
            if isinstance(target, Pattern)
            else self.improve(problem, found)
        )

    def improve(self, problem: Problem, found: Solution) -> Solution:
        """Make a solution better."""
        if not self.swaps:
            return _same_support(problem, found)
        done = swap(problem, found.mask, rounds=self.rounds, seconds=self.seconds)
        better = on_support(problem, done.mask, done.values)
        # Rows trade by importance, so the plain error may rise while the weighted one falls.
        improved = weighted_error(problem, better.weight) <= weighted_error(problem, found.weight)
        # A tie may fall differently on another kind of processor, and all must go the same way.
        return better if process_group().all_gather(improved)[0] else _same_support(problem, found)


def _same_support(problem: Problem, found: Solution) -> Solution:
    after = on_support(problem, found.mask)
    # Damping can make "optimal" a little worse in Ψ itself; a row that would lose keeps what it
    # had.
    better = problem.row_errors_of(after.weight) <= problem.row_errors_of(found.weight)
    weight = torch.where(better.view(*problem.weight.shape[:-1], 1), after.weight, found.weight)
    return finish(
        problem, weight.to(torch.float64), found.mask, damping=max(found.damping, after.damping)
    )
