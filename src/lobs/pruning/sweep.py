"""Prune to smaller and smaller sizes, measure each, and find where the network breaks.

The paper calls that place the pruning inflection point. Moments, sensitivities and error curves are
computed once and shared by all sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from lobs._system.context import alone
from lobs._system.progress import shown, track
from lobs.calibration.collect import collect_moments
from lobs.calibration.forward import fitted
from lobs.calibration.layer_problem import layer_problem
from lobs.errors import TargetError, warning_once
from lobs.layers import find_layers
from lobs.layers.hooks import nothing_left
from lobs.pruning.drop_search import score_of
from lobs.pruning.options import PruneOptions, checked
from lobs.pruning.run import run_rounds
from lobs.pruning.session import Session
from lobs.solvers import GreedyOBS, as_solver, solve
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.solution import Solution
from lobs.targets import ErrorBudget, Sparsity, Target

By: TypeAlias = Literal["keep", "epsilon"]
Score: TypeAlias = Callable[[nn.Module], float]


@dataclass(frozen=True)
class SweepPoint:
    """One size: value asked for, kept fraction, mean relative layer error, score."""

    asked: float
    kept_fraction: float
    relative_error: float
    score: float


def sweep(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Score,
    values: Sequence[float],
    *,
    by: By = "keep",
    solver: str | Solver = "auto",
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    progress: bool = True,
) -> list[SweepPoint]:
    """Prune to every value as `prune` does, always from the dense network, and score the result.

    Args:
        model: a trained network; untouched.
        batches: calibration data.
        evaluate: a score, larger is better; called once a value.
        values: fractions of all weights to keep (by keep), or the relative error ε of every layer
            (by epsilon).
        by: what the values mean.
        solver: as for `prune`.
        layers: layers to prune; all by default.
        skip: layers to leave alone.
        progress: show progress.
    """
    targets = [_target(value, by, "network") for value in values]
    given: PruneOptions = {"solver": solver, "layers": layers, "skip": skip}
    asked = [checked(model, target, given) for target in targets]
    points: list[SweepPoint] = []
    if not asked:
        return points
    costs = {layer.name: layer.weight.numel() * float(layer.columns) for layer in asked[0].layers}
    with alone(), nothing_left(model), warning_once(), shown(progress, layers=costs):
        first = Session(model, fitted(model, batches), asked[0])
        with track("sweep", len(targets)) as advance:
            for value, options in zip(values, asked, strict=True):
                run = run_rounds(first.with_options(options))
                results = run.results()
                kept, total = sum(r.kept for r in results), sum(r.total for r in results)
                error = sum(r.relative_error for r in results) / len(results)
                score = score_of(evaluate, run.model)
                points.append(SweepPoint(value, kept / max(total, 1), error, score))
                advance(1)
    return points


def sweep_by_layer(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Score,
    values: Sequence[float],
    *,
    by: By = "keep",
    solver: str | Solver = "lobs",
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    progress: bool = True,
) -> list[SweepPoint]:
    """Prune every layer to the same value on dense inputs, as the paper does, and score the result.

    The greedy solver runs once per layer and is cut at each value.

    Args:
        model: a trained network; untouched.
        batches: calibration data, run once.
        evaluate: a score, larger is better; called once a value.
        values: fractions of every layer to keep (by keep), or the relative error ε of every layer
            (by epsilon).
        by: what the values mean.
        solver: as for `prune`.
        layers: layers to prune; all by default.
        skip: layers to leave alone.
        progress: show progress.
    """
    targets = [_target(value, by, "layer") for value in values]
    chosen = as_solver(solver)
    work = copy.deepcopy(model)
    found = find_layers(work, layers, skip)
    points = []
    with alone(), nothing_left(model), warning_once(), shown(progress):
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
                points.append(_point(value, list(answers.values()), float(evaluate(work))))
                advance(1)
    return points


def _target(value: float, by: str, scope: Literal["layer", "network"]) -> Target:
    if by == "keep":
        return Sparsity(1 - value, scope=scope)
    if by == "epsilon":
        return ErrorBudget(value, relative=True)
    raise TargetError(f"cannot sweep by '{by}': use 'keep' or 'epsilon'.")


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
    """Return the point after which the score breaks.

    It is the point farthest above the chord from the first point to the worst, on the curve of the
    score against the fraction removed. None where there are fewer than four points, or where the
    score never falls below the first one.
    """
    ordered = sorted(points, key=lambda p: -p.kept_fraction)
    if len(ordered) < 4:
        return None
    worst = min(range(len(ordered)), key=lambda i: ordered[i].score)
    falling = ordered[: worst + 1]
    high, span = falling[0].score, falling[0].score - falling[-1].score
    width = falling[0].kept_fraction - falling[-1].kept_fraction
    if span <= 0 or width <= 0:
        return None

    def above_chord(p: SweepPoint) -> float:
        return (falling[0].kept_fraction - p.kept_fraction) / width - (high - p.score) / span

    return max(falling, key=above_chord)
