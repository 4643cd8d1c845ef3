"""Problems of layers so wide that their moment is kept once, in single precision.

An ordinary problem keeps Ψ, its equilibrated form and the inverse of that, all in float64: 15 GB
for the 25,088 columns of VGG-16's first fully-connected layer. Here only the equilibrated form is
kept, 2.5 GB, damped from the start. Weights are multiplied by √Ψ_qq, so errors mean the same.
`solve` returns solutions in the layer's own units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lobs.calibration.moments import Moments
from lobs.solvers import linalg, metric
from lobs.solvers.problem import Problem

# Damping relative to each column's energy. Float32 needs it to factorise 10,000s of columns.
RIDGE = 1e-3


def wide_problem(dense: Tensor, moments: Moments, *, overwrite: bool, **settings: Any) -> Problem:
    """Build the problem of a wide layer.

    Args:
        dense: the dense weights as a matrix.
        moments: the moments of its inputs.
        overwrite: the moment's memory may be reused for the problem.
        **settings: further fields of the `Problem`.
    """
    psi = moments.taken() if overwrite else moments.moment
    psi = psi.to(dense.device)
    ridge = max(RIDGE, metric.few_samples(psi.shape[-1], moments.count))
    scale = linalg.equilibrate(psi[0], ridge)
    weight, kind = dense.to(torch.float32) * scale, dense.dtype
    problem = Problem(
        weight, psi, samples=moments.count, ridge=ridge, units=scale, kind=kind, **settings
    )
    damping = ridge * float(scale.square().mean())  # in Ψ's units, as everywhere
    ready = metric.Metric(psi[0], torch.ones_like(scale), damping, least=ridge / (1 + ridge))
    problem.__dict__["metrics"] = (ready,)
    return problem


def asymmetric_wide_problem(problem: Problem, residual: Tensor) -> Problem:
    """Return the problem with W + (W D)(Ĥ + λI)⁻¹ in place of W; see `asymmetric_problem`."""
    assert problem.units is not None
    with problem.context.scratch(problem.moment[0]) as fresh:
        shift = linalg.ridge_solve_in_place(fresh(), residual.to(problem.weight)[0] / problem.units)
    moved = replace(problem, weight=problem.weight + shift.unsqueeze(0))
    moved.__dict__["metrics"] = problem.metrics
    return moved
