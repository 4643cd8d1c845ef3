"""Re-solve any solver's weights by least squares on the support it chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lobs import linalg
from lobs.problem import Problem, Solution, Solver, finish
from lobs.targets import Target


@dataclass(frozen=True)
class Refine:
    """The inner solver's mask with the best weights on it; never worse than the inner solver, row by row.

    Adds one Cholesky solve of |support|³/3 a row. By ε the inner solver meets the budget first, so the refined error is
    smaller than asked.
    """

    inner: Solver

    @property
    def needs(self) -> frozenset[str]:
        """What the inner solver needs."""
        return self.inner.needs

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        found = self.inner(problem, target)
        damping = found.damping
        parts = []
        shape = (len(problem.groups), *problem.weight.shape[-2:])
        for metric, (weight, moment), mask, before in zip(
            problem.metrics, problem.groups, found.mask.view(shape), found.weight.view(shape), strict=True
        ):
            damping = max(damping, metric.damping)
            solved = linalg.least_squares_on_support(metric.gram, metric.scaled(weight), mask)
            after = metric.unscaled(solved, weight, mask).to(problem.weight.dtype)
            better = _row_errors(after, weight, moment) <= _row_errors(before, weight, moment)
            # Damping can make "optimal" a little worse in Ψ itself; a row that would lose keeps what it had.
            parts.append(torch.where(better.unsqueeze(1), after, before))
        weight = torch.stack(parts).view(problem.weight.shape)
        return finish(problem, weight.to(torch.float64), found.mask, damping=damping)


def _row_errors(v: torch.Tensor, w: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    delta = v.to(torch.float64) - w.to(torch.float64)
    return ((delta @ moment.to(torch.float64)) * delta).sum(dim=1)
