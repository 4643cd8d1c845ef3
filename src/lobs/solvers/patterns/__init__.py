"""Solvers for patterns: targets that fix where zeros may lie.

A `Pattern` in `lobs.targets` names the module that solves it. That module holds a constant
`SOLVER`, a `PatternSolver`. Nothing else lists patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from lobs.solvers.costs import ProblemShape
from lobs.solvers.kernels import Backend
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution
from lobs.targets import Pattern


@dataclass(frozen=True)
class PatternSolver:
    """What a pattern's module brings.

    Args:
        solve: returns the solution of (problem, target, backend of the kernels).
        seconds: estimates the time of solving on two cores from a shape with its target.
        mask_by_score: returns the mask of (problem, target, scores) that keeps the highest scores;
            None where the pattern has no such rule.
    """

    solve: Callable[[Problem, Any, Backend], Solution]
    seconds: Callable[[ProblemShape], float]
    mask_by_score: Callable[[Problem, Any, Tensor], Tensor] | None = None


def pattern_solver(target: Pattern) -> PatternSolver:
    """Return what solves a pattern."""
    solver: PatternSolver = import_module(target.solved_by).SOLVER
    return solver
