"""Build the layer problem: a layer, its dense weights and its moments become a `Problem`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lobs._system import context
from lobs.calibration.moments import Moments
from lobs.calibration.wide import asymmetric_wide_problem, wide_problem
from lobs.layers import Layer
from lobs.solvers import linalg, metric, scores
from lobs.solvers.least_squares import least_squares
from lobs.solvers.problem import Problem
from lobs.solvers.scores import Histogram
from lobs.targets import NByM, Sparsity, Target

# Least λ of the asymmetric target, relative to the mean input energy. It holds the target to the
# dense weights.
_TETHER = 1e-3
_TETHERS = (1.0, 10.0, 100.0)  # multiples of the least λ among which held-out samples choose
# Dampings among which held-out samples choose, as shares of the mean energy for one sample a
# column. With n samples a column they are n times smaller.
_DAMPINGS = (0.1, 0.3, 1.0)
_LEAST_DAMPING = 1e-4  # share of the mean energy; smaller dampings are not tried
# Least share of the error that another damping must take off. Rows are judged on simple supports,
# which like more damping than those of a good solver.
_DAMPING_GAIN = 0.05
_JUDGED_ROWS = 32  # rows that stand for a layer when its damping is chosen


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
    """Build one layer's problem: reproduce `dense` on the inputs that `moments` saw.

    Args:
        layer: the layer to prune.
        dense: its dense weights as a matrix.
        moments: the moments of its inputs.
        prune_bias: biases may be removed too.
        damping: λ added to Ψ's diagonal; None to have it chosen.
        row_weight: importance of each row's error.
        curvature: diagonal of the loss's curvature.
        overwrite: the moment's memory may be reused for the problem.
    """
    settings: dict[str, Any] = {
        "bias_column": layer.bias is not None and not prune_bias,
        "mean": moments.mean.to(dense.device),
        "row_weight": row_weight,
        "curvature": curvature,
        "positions": 1 if prune_bias else layer.positions,
        "name": f"layer '{layer.name}'",
        "context": context.current(),
    }
    if moments.single_copy and damping is None:
        return wide_problem(dense, moments, overwrite=overwrite, **settings)
    return Problem(
        dense, moments.moment.to(dense.device), samples=moments.count, damping=damping, **settings
    )


def asymmetric_problem(
    problem: Problem,
    residual: Tensor,
    held_out: tuple[Tensor, Tensor] | None = None,
    kept: float = 0.5,
) -> Problem:
    """Return the problem of giving on these inputs what the dense network's layer gives.

    min ‖V X̂ − W X‖² + λ‖V − W‖² has its free optimum at W + W D (Ĥ + λI)⁻¹ with
    D = E[(x − x̂) x̂ᵀ]. The new problem has that optimum in place of W.

    With few samples for many inputs the shift is partly an accident of the sample. Held-out samples
    then say how much of it serves: they choose λ, and which share of the shift is taken. They also
    choose the damping of Ψ that the sparse weights are solved with.

    Args:
        problem: the problem of reproducing W on the pruned network's inputs.
        residual: W D.
        held_out: Ĥ and W D of held-out samples; without them the whole shift is taken.
        kept: estimated share of the weights that will be kept.
    """
    if problem.units is not None:
        return asymmetric_wide_problem(problem, residual.to(problem.weight.device))
    parts = []
    pairs = zip(problem.groups, residual.to(problem.weight.device), strict=True)
    for g, ((weight, moment), part) in enumerate(pairs):
        mean = float(moment.diagonal().mean())
        few = metric.few_samples(len(moment), problem.samples) * float(
            metric.own_energy(moment, problem.protected)
        )
        lam = max(_TETHER * mean, few)
        if lam == 0:  # all inputs are zero
            parts.append(weight)
            continue
        if held_out is None:
            shift = linalg.ridge_solve(moment, part, lam)
        else:
            ladder = [lam * step for step in _TETHERS]
            shift = _serving(moment, part, ladder, held_out[0][g], held_out[1][g])
        parts.append((weight.to(torch.float64) + shift).to(weight.dtype))
    moved = replace(problem, weight=torch.stack(parts).view(problem.weight.shape))
    if held_out is None or len(parts) > 1 or problem.damping is not None:
        return moved
    chosen = _damping(moved, problem.groups[0][0], kept, held_out)
    return replace(moved, least_damping=moved.context.group.all_gather(chosen)[0])


def kept_share(target: Target | None, problem: Problem) -> float:
    """Return the share of a layer's weights that a target keeps; a half where it is not known."""
    match target:
        case Sparsity():
            return 1 - target.count(problem.prunable) / max(1, problem.prunable)
        case NByM(n=int(n), m=m):
            return n / m
    return 0.5


def _damping(
    problem: Problem, dense: Tensor, kept: float, held_out: tuple[Tensor, Tensor]
) -> float:
    """Return the damping under which sparse weights have the least error on held-out samples.

    A sample of rows is solved on the support of largest w²Ψ_qq. 0 where the problem's own choice
    is about as good.

    Args:
        problem: the problem with its aim.
        dense: the layer's dense weights.
        kept: share of the weights that will be kept.
        held_out: Ĥ and W D of held-out samples.
    """
    (weight, moment), d = problem.groups[0], problem.weight.shape[-1]
    energy = float(metric.own_energy(moment, problem.protected))
    per_sample = energy * d / max(1, problem.samples or 0)
    tried = [share * per_sample for share in _DAMPINGS]
    tried = [lam for lam in tried if lam >= _LEAST_DAMPING * energy]
    if not energy or not tried or not 0 < kept < 1:
        return 0.0
    rows = torch.linspace(0, len(weight) - 1, min(_JUDGED_ROWS, len(weight))).round().long()
    moment, wanted, before = moment.double(), weight[rows].double(), dense[rows].double()
    moment_held, residual_held = held_out[0][0].double(), held_out[1][0][rows].double()
    free = d - problem.protected
    sizes = (wanted.square() * moment.diagonal())[:, :free]
    mask = torch.ones_like(wanted, dtype=torch.bool)
    mask[:, :free] = False
    mask.scatter_(1, sizes.topk(round(kept * free), dim=1).indices, True)

    def errors(lam: float) -> tuple[float, float]:
        """Return the error, but for E‖W (x − x̂)‖², and the part that comes from the weights."""
        gram = moment.clone()
        gram.diagonal().add_(lam)
        change = least_squares(gram, wanted, mask) - before
        own = float(((change @ moment_held) * change).sum())
        return own - 2 * float((change * residual_held).sum()), own

    first, size = errors(energy * metric.few_samples(d, problem.samples))
    best, lam = min((errors(lam)[0], lam) for lam in tried)
    return lam if best < first - _DAMPING_GAIN * size else 0.0


def _serving(
    moment: Tensor, residual: Tensor, ladder: Sequence[float], held_moment: Tensor, held: Tensor
) -> Tensor:
    """Return the shift that lowers the error on held-out samples most; zero if none does."""
    best, chosen = 0.0, torch.zeros_like(residual, dtype=torch.float64)
    for lam in ladder:
        shift = linalg.ridge_solve(moment, residual, lam).to(torch.float64)
        # The error of the share a is E₀ − 2 a·won + a²·paid.
        won = float((shift * held.to(shift)).sum())
        paid = float(((shift @ held_moment.to(shift)) * shift).sum())
        share = min(1.0, max(0.0, won / paid)) if paid > 0 else 0.0
        gain = 2 * share * won - share**2 * paid
        if gain > best:
            best, chosen = gain, share * shift
    return chosen


def sensitivities(problem: Problem) -> tuple[Tensor, float]:
    """Return the error of deleting each prunable weight alone, flat, and the damping used."""
    values = [
        scores.obs(weight, metric)[:, : weight.shape[-1] - problem.protected].flatten()
        for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True)
    ]
    return torch.cat(values).cpu(), max(metric.damping for metric in problem.metrics)


def histogram(problem: Problem, bins: int = 60) -> Histogram:
    """Return the sensitivities of all prunable weights on a log₁₀ scale."""
    values, _ = sensitivities(problem)
    logs = values[values > 0].log10()
    if not len(logs):
        return Histogram((), (), len(values))
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    counts = torch.histc(logs, bins, low, high)
    edges = torch.linspace(low, high, bins + 1)
    return Histogram(tuple(edges.tolist()), tuple(int(c) for c in counts), len(values) - len(logs))
