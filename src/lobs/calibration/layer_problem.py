"""The bridge between a network's layers and the math: a layer, its weights and its moments become a problem."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lobs.calibration.moments import Moments
from lobs.calibration.wide import aimed, wide_problem
from lobs.layers import Layer
from lobs.solvers import linalg, metric, scores
from lobs.solvers.problem import Problem
from lobs.solvers.scores import Histogram

# How far at least, in mean input energy, the asymmetric target is held to the dense weights.
_TETHER = 1e-3


def layer_problem(
    layer: Layer,
    dense: Tensor,
    moments: Moments,
    *,
    prune_bias: bool = False,
    damping: float | None = None,
    row_weight: Tensor | None = None,
    curvature: Tensor | None = None,
    overwrite: bool = False,
) -> Problem:
    """The matrix problem of one layer: reproduce `dense` on the inputs that `moments` saw; they may be used up if `mine`."""
    settings: dict[str, Any] = {
        "bias_column": layer.bias is not None and not prune_bias,
        "mean": moments.mean.to(dense.device),
        "row_weight": row_weight,
        "curvature": curvature,
        "positions": 1 if prune_bias else math.prod(layer.weight.shape[2:]),
        "name": f"layer '{layer.name}'",
    }
    if moments.single_copy and damping is None:
        return wide_problem(dense, moments, overwrite=overwrite, **settings)
    return Problem(
        dense, moments.moment.to(dense.device), samples=moments.count, damping=damping, **settings
    )


def asymmetric_problem(problem: Problem, missed: Tensor) -> Problem:
    """The same layer with a wider aim: give on these inputs what the dense layer gives on the dense network's.

    min ‖V X̂ − W X‖² + λ‖V − W‖² has its free optimum at W + W D (Ĥ + λI)⁻¹, D = E[(x − x̂) x̂ᵀ];
    what is left to do is the old problem with that in place of W. `missed` is W D.
    """
    if problem.units is not None:
        return aimed(problem, missed.to(problem.weight.device))
    parts = []
    for (weight, moment), away in zip(
        problem.groups, missed.to(problem.weight.device), strict=True
    ):
        few = metric.few_samples(len(moment), problem.samples) * float(
            metric.own_energy(moment, problem.protected)
        )
        lam = max(_TETHER * float(moment.diagonal().mean()), few)
        if lam == 0:  # nothing reaches the layer, so nothing can be mended there
            parts.append(weight)
            continue
        shift = linalg.ridge_solve(moment, away, lam)
        parts.append((weight.to(torch.float64) + shift).to(weight.dtype))
    return replace(problem, weight=torch.stack(parts).view(problem.weight.shape))


def sensitivities(problem: Problem) -> tuple[Tensor, float]:
    """The error of deleting each prunable weight alone, flat, and the damping this took."""
    values = [
        scores.obs(weight, metric)[:, : weight.shape[-1] - problem.protected].flatten()
        for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True)
    ]
    return torch.cat(values).cpu(), max(metric.damping for metric in problem.metrics)


def histogram(problem: Problem, bins: int = 60) -> Histogram:
    """Sensitivities of all prunable weights on a log₁₀ scale."""
    values, _ = sensitivities(problem)
    logs = values[values > 0].log10()
    if not len(logs):
        return Histogram((), (), len(values))
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    counts = torch.histc(logs, bins, low, high)
    edges = torch.linspace(low, high, bins + 1)
    return Histogram(tuple(edges.tolist()), tuple(int(c) for c in counts), len(values) - len(logs))
