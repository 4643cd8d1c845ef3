"""What solvers share: the precision they may sweep in, and the way from a mask to a solution."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs import linalg
from lobs.problem import Problem, Solution, finish

# Below this independence float32 would lose the third digit of a loss; sweeps then run in float64.
_FLOAT32_SAFE = 1e-4


def sweep_dtype(metric: linalg.Metric, weight: Tensor) -> torch.dtype:
    """Float32 where Ψ is well-conditioned and the weights are not float64."""
    single = weight.dtype != torch.float64 and metric.independence >= _FLOAT32_SAFE
    return torch.float32 if single else torch.float64


def on_support(problem: Problem, mask: Tensor, *, curve: Tensor | None = None) -> Solution:
    """Least squares on a support, row by row: |support|³/3 multiply-adds a row."""
    shape = (len(problem.groups), *problem.weight.shape[-2:])
    parts = []
    for metric, (weight, _), kept in zip(problem.metrics, problem.groups, mask.view(shape), strict=True):
        solved = linalg.least_squares_on_support(metric.gram, metric.scaled(weight), kept)
        parts.append(metric.unscaled(solved, weight, kept))
    weight = torch.stack(parts).view(problem.weight.shape)
    damping = max(metric.damping for metric in problem.metrics)
    return finish(problem, weight, mask, damping=damping, curve=curve)
