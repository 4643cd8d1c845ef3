"""Layers so wide that their moment exists once: equilibrated where it lies, in single precision, and damped from the start.

An ordinary problem keeps Ψ, its equilibrated form and that form's inverse, all in float64: 15 GB
for the 25,088 columns of VGG-16's first fully-connected layer. Here the equilibrated form, 2.5 GB,
is all there is. Weights come multiplied by √Ψ_qq, so that errors mean the same; `solve` gives
solutions in the layer's own units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lobs._system import memory
from lobs.calibration.moments import Moments
from lobs.solvers import linalg, metric
from lobs.solvers.problem import Problem

# Of every column's own energy: what float32 needs to factorise tens of thousands of columns.
RIDGE = 1e-3


def wide_problem(dense: Tensor, moments: Moments, *, overwrite: bool, **settings: Any) -> Problem:
    """The problem of a wide layer; if the moments are `mine`, their memory becomes the problem's."""
    psi = moments.taken() if overwrite else moments.moment
    psi = psi.to(dense.device)
    ridge = max(RIDGE, metric.few_samples(psi.shape[-1], moments.count))
    scale = linalg.equilibrate(psi[0], ridge)
    weight, kind = dense.to(torch.float32) * scale, dense.dtype
    problem = Problem(
        weight, psi, samples=moments.count, ridge=ridge, units=scale, kind=kind, **settings
    )
    # What the moment was made into is what solvers want of it. λ is told in Ψ's units, as
    # everywhere.
    told = ridge * float(scale.square().mean())
    ready = metric.Metric(psi[0], torch.ones_like(scale), told, least=ridge / (1 + ridge))
    problem.__dict__["metrics"] = (ready,)
    return problem


def aimed(problem: Problem, missed: Tensor) -> Problem:
    """The same problem with W + (W D)(Ĥ + λI)⁻¹ in place of W, which gives what the dense network gives; see `bridge`."""
    assert problem.units is not None
    with memory.scratch(problem.moment[0]) as fresh:
        shift = linalg.ridge_solve_in_place(fresh(), missed.to(problem.weight)[0] / problem.units)
    moved = replace(problem, weight=problem.weight + shift.unsqueeze(0))
    moved.__dict__["metrics"] = problem.metrics
    return moved
