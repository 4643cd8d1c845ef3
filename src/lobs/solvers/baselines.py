"""The baselines that score, cut and compensate nothing: random, magnitude (LWC), OBD, ApoZW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import SolverError
from lobs.solvers import scores
from lobs.solvers.masks import mask_from_order, removal_order
from lobs.solvers.patterns.nbym import largest_of_groups, quota_of
from lobs.solvers.problem import Problem, choose_count, finish
from lobs.solvers.solution import Solution
from lobs.targets import NByM, Target

_SCORES: dict[str, Callable[[Problem], Tensor]] = {
    "magnitude": scores.magnitude,
    "obd": scores.obd,
    "obd-fisher": scores.obd_fisher,
    "apozw": scores.apozw,
}


@dataclass(frozen=True)
class Scored:
    """Mask by score, weights untouched; n:m too. Time and memory of one sort of the layer; `seed` is for `random` alone."""

    score: str = "magnitude"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.score not in ("random", *_SCORES):
            raise SolverError(
                f"unknown score '{self.score}'. There are: random, {', '.join(_SCORES)}."
            )

    @property
    def needs(self) -> frozenset[str]:
        """Apozw needs the mean input, obd-fisher the loss's curvature."""
        return frozenset({"apozw": ["mean"], "obd-fisher": ["curvature"]}.get(self.score, []))

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        values = (
            scores.random(problem, self.seed)
            if self.score == "random"
            else _SCORES[self.score](problem)
        )
        shape = tuple(problem.weight.shape)
        order = removal_order(values, problem.protected)
        weight = problem.weight.to(torch.float64)
        if isinstance(target, NByM):
            return finish(problem, weight, largest_of_groups(values, quota_of(problem, target)))

        def solution_at(count: int) -> Solution:
            return finish(problem, weight, mask_from_order(order, count, shape))

        return solution_at(choose_count(problem, target, lambda k: solution_at(k).error))
