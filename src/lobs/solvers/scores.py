"""Score the importance of weights: functions from a problem to scores of the weight's shape.

Low scores go first. Only the order matters to a mask, but `obd` and `obs` are also errors in the
units of E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import ProblemError
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem


def random(problem: Problem, seed: int = 0) -> Tensor:
    """Return random scores that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(problem.weight.shape, generator=generator, dtype=torch.float64)
    return drawn.to(problem.weight.device)


def magnitude(problem: Problem) -> Tensor:
    """Return |w|: learning weights and connections (LWC), Han et al. 2015."""
    return problem.own_weight.abs()


def obd(problem: Problem) -> Tensor:
    """Return w² Ψ_qq: the layer error of deleting a weight without a refit.

    This is optimal brain damage (LeCun et al. 1990) with the layer's output error in place of the
    network's loss.
    """
    energy = problem.moment.to(torch.float64).diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return problem.weight.to(torch.float64).square() * energy


def obd_fisher(problem: Problem) -> Tensor:
    """Return ½ w² h_qq, where h is the diagonal of the Gauss–Newton matrix of the network's loss.

    This is optimal brain damage proper.
    """
    if problem.curvature is None:
        raise ProblemError(
            f"{problem.name}: obd-fisher needs the loss's curvature. Pass curvature= to Problem, "
            "or use lobs.prune."
        )
    curvature = problem.curvature.to(problem.weight.device, torch.float64)
    return 0.5 * problem.own_weight.square() * curvature


def apozw(problem: Problem) -> Tensor:
    """Return |mean(y_q) · w_q|: the paper's ApoZW.

    It is a weight-wise form of the average percentage of zeros (Hu et al. 2016).
    """
    if problem.mean is None:
        raise ProblemError(
            f"{problem.name}: apozw needs the mean input. Pass mean= to Problem, or use "
            "lobs.collect_moments."
        )
    return (problem.own_weight * problem.mean.to(torch.float64).unsqueeze(-2)).abs()


def obs(weight: Tensor, metric: Metric) -> Tensor:
    """Return w_q² / [Ψ⁻¹]_qq: the layer error of deleting a weight and refitting its row.

    The paper prints half of it; the order is the same.
    """
    return metric.scaled(weight).square() / metric.inverse.diagonal()


@dataclass(frozen=True)
class Histogram:
    """Count the weights whose sensitivity falls into each step of log₁₀.

    `edges` are the steps' limits. `zeros` counts the weights of sensitivity 0: they have no
    logarithm.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int
