"""Whole output units, and whole input channels.

Units are rows, and rows are independent: the units of least cost are the optimal choice, not just a
greedy one. A removed unit keeps its bias at the constant that replaces its output best: its mean.
Without a bias its output is zero. Channels are blocks of columns that all rows lose together: group
OBS with one inverse for the whole layer.
"""

from __future__ import annotations

import torch

from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.kernels import Backend
from lobs.solvers.least_squares import on_support
from lobs.solvers.patterns import PatternSolver
from lobs.solvers.patterns.block import block_path
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, mask_from_order, removal_order
from lobs.targets import Structured


def solve_structured(problem: Problem, target: Structured, backend: Backend = "auto") -> Solution:
    """Remove the target's share of units or input channels, of all groups together.

    Args:
        problem: the layer problem.
        target: what to remove.
        backend: unused; there is one implementation.
    """
    return _units(problem, target) if target.what == "units" else _inputs(problem, target)


def _units(problem: Problem, target: Structured) -> Solution:
    silent = torch.zeros_like(problem.weight, dtype=torch.bool)
    silent[..., silent.shape[-1] - problem.protected :] = True
    delta = (on_support(problem, silent).weight - problem.weight).to(torch.float64)
    costs = ((delta @ problem.moment.to(torch.float64)) * delta).sum(dim=-1)
    kept = mask_from_order(removal_order(costs), target.count(costs.numel()), tuple(costs.shape))
    return on_support(problem, silent | kept.unsqueeze(-1))


def _inputs(problem: Problem, target: Structured) -> Solution:
    channels = (problem.weight.shape[-1] - problem.protected) // problem.positions
    count = target.count(channels * len(problem.groups))
    rows = problem.weight.shape[-2]
    path = block_path(problem, rows, problem.positions, min(count, channels))
    return path.cut(count)


def _seconds(shape: ProblemShape) -> float:
    """Estimate the time: units take next to none."""
    assert isinstance(shape.target, Structured)
    inputs = shape.target.what == "inputs"
    return COSTS.blocks * shape.groups * shape.columns**3 / 2e9 if inputs else 0.0


SOLVER = PatternSolver(solve_structured, _seconds)
