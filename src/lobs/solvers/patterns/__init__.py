"""Solvers for patterns: targets that fix where zeros may lie.

A `Pattern` in `lobs.targets` names the module that solves it. That module holds a constant
`SOLVER`, a `PatternSolver`. Nothing else lists patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from lobs.solvers.costs import ProblemShape
from lobs.solvers.kernels import Backend
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution
from lobs.targets import Pattern


class ColumnChoice(Protocol):
    """Choose what a sweep over the columns keeps of the next `step` columns."""

    @property
    def step(self) -> int:
        """Return the columns that are chosen from together."""

    def kept(self, cost: Tensor) -> Tensor:
        """Return True where a weight stays, by what the loss of each would cost."""


@dataclass(frozen=True)
class PatternSolver:
    """What a pattern's module brings.

    Args:
        solve: returns the solution of (problem, target, backend of the kernels).
        seconds: estimates the time of solving on two cores from a shape with its target.
        mask_by_score: returns the mask of (problem, target, scores) that keeps the highest scores;
            None where the pattern has no such rule.
        column_choice: returns the problem to sweep over and what the sweep keeps, from (problem,
            target); None where a sweep over the columns cannot make the pattern.
        quick: as `solve`, for a layer whose block is refitted afterwards; None if it is as quick.
    """

    solve: Callable[[Problem, Any, Backend], Solution]
    seconds: Callable[[ProblemShape], float]
    mask_by_score: Callable[[Problem, Any, Tensor], Tensor] | None = None
    column_choice: Callable[[Problem, Any], tuple[Problem, ColumnChoice]] | None = None
    quick: Callable[[Problem, Any, Backend], Solution] | None = None


def pattern_solver(target: Pattern) -> PatternSolver:
    """Return what solves a pattern."""
    solver: PatternSolver = import_module(target.solved_by).SOLVER
    return solver
