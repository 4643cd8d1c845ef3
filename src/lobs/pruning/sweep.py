"""Raise the ratio (or ε) step by step, watch the network, find where it breaks.

The paper calls that place the pruning inflection point. Statistics are collected once; the exact
solver also runs once and is only cut at each step, so a sweep of a hundred points costs about as
much as one pruning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from lobs._system.progress import shown, track
from lobs.calibration.collect import collect_moments
from lobs.calibration.layer_problem import layer_problem
from lobs.errors import TargetError
from lobs.layers import find_layers
from lobs.solvers import GreedyOBS, as_solver, solve
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.solution import Solution
from lobs.targets import ErrorBudget, Sparsity, Target

By: TypeAlias = Literal["ratio", "epsilon"]


@dataclass(frozen=True)
class SweepPoint:
    """One step: what was asked, what was kept, the mean relative layer error, what `evaluate` said."""

    asked: float
    kept_fraction: float
    relative_error: float
    score: float


def sweep(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Callable[[nn.Module], float],
    values: Sequence[float],
    *,
    by: By = "ratio",
    solver: str | Solver = "greedy",
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    progress: bool = True,
) -> list[SweepPoint]:
    """Prune to every value in turn, always from the dense network, and evaluate.

    Args:
        model: a trained network; untouched.
        batches: calibration data, run once.
        evaluate: a number for a network, e.g. its test error; called once a value.
        values: fractions removed from every layer (by ratio), or relative errors ε of every layer
            (by epsilon).
        by: what the values mean.
        solver: as for `prune`.
        layers: layers to prune; all by default.
        skip: layers to leave alone.
        progress: draw bars.
    """
    if by not in ("ratio", "epsilon"):
        raise TargetError(f"cannot sweep by '{by}': use 'ratio' or 'epsilon'.")
    targets = [
        Sparsity(v, scope="layer") if by == "ratio" else ErrorBudget(v, relative=True)
        for v in values
    ]
    chosen = as_solver(solver)
    work = copy.deepcopy(model)
    found = find_layers(work, layers, skip)
    points = []
    with shown(progress):
        calibration = collect_moments(work, batches, found, progress=progress)
        problems = {
            layer.name: layer_problem(layer, layer.matrix(), calibration[layer.name])
            for layer in found
        }
        solvers = {name: _reusable(problem, chosen) for name, problem in problems.items()}
        with track("sweep", len(targets)) as advance:
            for value, target in zip(values, targets, strict=True):
                answers = {name: solvers[name](target) for name in problems}
                for layer in found:
                    layer.write(answers[layer.name].weight)
                points.append(_point(value, list(answers.values()), evaluate(work)))
                advance(1)
    return points


def _reusable(problem: Problem, solver: Solver) -> Callable[[Target], Solution]:
    if isinstance(solver, GreedyOBS):
        path = solver.path(problem)
        return lambda target: problem.given_back(path.solve(target))
    return lambda target: solve(problem, solver, target)


def _point(asked: float, answers: Sequence[Solution], score: float) -> SweepPoint:
    kept, total = sum(a.kept for a in answers), sum(a.prunable for a in answers)
    relative = sum(a.relative_error for a in answers) / len(answers)
    return SweepPoint(asked, kept / max(total, 1), relative, score)


def inflection(points: Sequence[SweepPoint]) -> SweepPoint | None:
    """The step after which the score breaks: the point farthest below the chord from the first point to the worst.

    That is the "knee" of the curve of score (lower is better, like a test error) against the
    fraction removed. None where there are fewer than four points or the score never gets worse than
    where it began.
    """
    ordered = sorted(points, key=lambda p: -p.kept_fraction)
    if len(ordered) < 4:
        return None
    worst = max(range(len(ordered)), key=lambda i: ordered[i].score)
    rising = ordered[: worst + 1]
    low, span = rising[0].score, rising[-1].score - rising[0].score
    width = rising[0].kept_fraction - rising[-1].kept_fraction
    if span <= 0 or width <= 0:
        return None

    def below_chord(p: SweepPoint) -> float:
        return (rising[0].kept_fraction - p.kept_fraction) / width - (p.score - low) / span

    return max(rising, key=below_chord)
