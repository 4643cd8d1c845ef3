"""Solvers by name, and `solve`, which runs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from lobs.errors import SolverError
from lobs.solvers.admm import ADMM
from lobs.solvers.auto import Auto
from lobs.solvers.baselines import Scored
from lobs.solvers.column_sweep import ColumnSweep
from lobs.solvers.greedy import DeletionPath, GreedyOBS
from lobs.solvers.layerwise_obs import LOBS
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.refine import Refine
from lobs.solvers.solution import Solution, finish
from lobs.targets import ErrorBudget, Target, wanted

__all__ = [
    "ADMM",
    "LOBS",
    "SOLVERS",
    "Auto",
    "ColumnSweep",
    "DeletionPath",
    "GreedyOBS",
    "Refine",
    "Scored",
    "as_solver",
    "solve",
]

# The keys are the choices of the command line. Every entry must obey the laws in tests/laws.py.
SOLVERS: dict[str, Solver] = {
    "auto": Auto(),
    "greedy": GreedyOBS(),
    "greedy+refine": Refine(GreedyOBS()),
    "admm": ADMM(),
    "columns": ColumnSweep(),
    "lobs": LOBS(),
    "lobs+refine": Refine(LOBS()),
    "magnitude": Scored("magnitude"),
    "magnitude+refine": Refine(Scored("magnitude")),
    "obd": Scored("obd"),
    "obd-fisher": Scored("obd-fisher"),
    "apozw": Scored("apozw"),
    "random": Scored("random"),
}


def solve(
    problem: Problem,
    solver: str | Solver,
    target: Target | None = None,
    *,
    keep: float | str | None = None,
) -> Solution:
    """Make one layer sparse and return the solution.

    Args:
        problem: the layer problem.
        solver: a name from `SOLVERS`, or a solver.
        target: `Sparsity`, `ErrorBudget` or a pattern.
        keep: the fraction of weights to keep, in place of a target: 0.1 or "10%".

    >>> import torch
    >>> problem = Problem(torch.tensor([[3.0, 1.0, 2.0]]), torch.eye(3))
    >>> solve(problem, "greedy", keep=2 / 3).weight
    tensor([[3., 0., 2.]])
    """
    chosen = as_solver(solver)
    if not isinstance(problem, Problem):
        raise SolverError(
            f"solve takes a Problem, not a {type(problem).__name__}; a whole network goes to "
            "lobs.prune."
        )
    missing = [need for need in sorted(chosen.needs) if getattr(problem, need) is None]
    if missing:
        raise SolverError(
            f"{problem.name}: solver {solver!r} is not compatible with this problem: missing "
            f"{', '.join(missing)}. Pass it to Problem, or use lobs.collect_moments."
        )
    asked = wanted(target, keep)
    if problem.prunable == 0:  # no rows, or nothing but biases
        return finish(
            problem,
            problem.weight.to(torch.float64),
            torch.ones_like(problem.weight, dtype=torch.bool),
        )
    found = problem.given_back(chosen(problem, asked))
    if problem.units is None or not isinstance(asked, ErrorBudget):
        return found
    # A wide layer's weights are rounded to its own dtype after the choice. Where that exceeds the
    # limit, a stricter target is solved.
    limit = asked.limit(problem.energy)
    epsilon = float(asked.epsilon)  # type: ignore[arg-type]  # a number for a single layer
    while found.removed and found.error > limit:
        epsilon *= 0.97
        found = problem.given_back(chosen(problem, replace(asked, epsilon=epsilon)))
    return found


def as_solver(solver: str | Solver) -> Solver:
    """Return the solver of a name, or the instance itself."""
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise SolverError(f"unknown solver '{solver}'. There are: {', '.join(SOLVERS)}.")
        return SOLVERS[solver]
    if isinstance(solver, Solver) and not isinstance(solver, type):
        return solver
    raise SolverError(
        f"{solver!r} is not a solver: it needs a `needs` set and to be callable on (problem, "
        "target); give an instance."
    )
