"""The baselines that score and cut without a refit: random, magnitude (LWC), OBD, ApoZW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import SolverError
from lobs.solvers import scores
from lobs.solvers.costs import ProblemShape
from lobs.solvers.patterns import pattern_solver
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, choose_count, finish, mask_from_order, removal_order
from lobs.targets import Pattern, Target

_SCORES: dict[str, Callable[[Problem], Tensor]] = {
    "magnitude": scores.magnitude,
    "obd": scores.obd,
    "obd-fisher": scores.obd_fisher,
    "apozw": scores.apozw,
}


@dataclass(frozen=True)
class Scored:
    """Remove the lowest scores and leave the other weights as they are; n:m patterns too.

    Takes time and memory of one sort of the layer.

    Args:
        score: "magnitude", "obd", "obd-fisher", "apozw" or "random".
        seed: seed of `random`.
    """

    score: str = "magnitude"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.score not in ("random", *_SCORES):
            raise SolverError(
                f"unknown score '{self.score}'. There are: random, {', '.join(_SCORES)}."
            )

    @property
    def needs(self) -> frozenset[str]:
        """The mean input for `apozw`, the loss's curvature for `obd-fisher`."""
        return frozenset({"apozw": ["mean"], "obd-fisher": ["curvature"]}.get(self.score, []))

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time: a sort takes next to none."""
        return 0.0

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        return shape.solving_bytes

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        values = (
            scores.random(problem, self.seed)
            if self.score == "random"
            else _SCORES[self.score](problem)
        )
        shape = tuple(problem.weight.shape)
        order = removal_order(values, problem.protected)
        weight = problem.weight.to(torch.float64)
        by_score = pattern_solver(target).mask_by_score if isinstance(target, Pattern) else None
        if by_score is not None:
            return finish(problem, weight, by_score(problem, target, values))

        def solution_at(count: int) -> Solution:
            return finish(problem, weight, mask_from_order(order, count, shape))

        return solution_at(choose_count(problem, target, lambda k: solution_at(k).error))
