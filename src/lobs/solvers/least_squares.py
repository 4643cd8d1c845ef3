"""The best weights on a given support: least squares, directly or by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lobs._system.distributed import ProcessGroup
from lobs.solvers import linalg
from lobs.solvers.kernels.rows import blocks, by_rows, listed
from lobs.solvers.linalg import is_narrow
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, finish
from lobs.solvers.together import fit_together

Vector: TypeAlias = Sequence[Tensor]  # one vector, in parts

# Below this independence float32 loses the third digit of a loss, so float64 is used.
FLOAT32_SAFE = 1e-4
# Multiply-adds of one Cholesky per row: from _FEW on, weights that are best already are left alone
# and processes share the rows. From _SOME on, conjugate gradients are preferred from a near start,
# and from _MANY on always.
_FEW, _SOME, _MANY = 1e6, 1e8, 2e10
# Largest excess of the error that is left alone, and that a few steps in float64 remove.
_BEST, _ROUNDING = 1e-5, 1e-3


def conjugate_gradients(
    product: Callable[[Vector], Vector],
    right: Vector,
    start: Vector,
    *,
    dot: Callable[[Vector, Vector], Tensor],
    done: Callable[[Tensor, Tensor], bool],
    steps: int,
    precondition: Callable[[Vector], Vector] = lambda residual: residual,
) -> Vector:
    """Approach the solution of A x = b for a symmetric positive definite A.

    Several independent systems can share the tensors: then `dot` returns one number for each.

    Args:
        product: maps v to A v.
        right: b − A x for the start x.
        start: x to start from.
        dot: inner products of two vectors.
        done: tells from the present and the first squared residual whether to stop.
        steps: largest number of steps.
        precondition: maps a residual to a direction, about A⁻¹ times it.
    """
    x, residual = start, right
    direction = ahead = precondition(residual)
    size = first = dot(residual, ahead)
    tiny = torch.finfo(size.dtype).tiny
    for _ in range(steps):
        if done(size, first):
            break
        image = product(direction)
        length = size / dot(direction, image).clamp_min(tiny)
        x = [v + length * d for v, d in zip(x, direction, strict=True)]
        residual = [r - length * a for r, a in zip(residual, image, strict=True)]
        ahead = precondition(residual)
        size, before = dot(residual, ahead), size
        ratio = size / before.clamp_min(tiny)
        direction = [a + ratio * d for a, d in zip(ahead, direction, strict=True)]
    return x


def approach_least_squares(
    gram: Tensor, weight: Tensor, mask: Tensor, start: Tensor, *, steps: int, tolerance: float = 0.0
) -> Tensor:
    """Approach least squares on a support by conjugate gradients, all rows at once.

    One step is one product of rows·d².

    Args:
        gram: G, (d, d), or with a leading group dimension.
        weight: the weights to approximate.
        mask: True on each row's support.
        start: weights to start from.
        steps: largest number of steps.
        tolerance: stop when every row's gradient has fallen by this factor.
    """
    v = torch.where(mask, start, 0.0)
    (found,) = conjugate_gradients(
        lambda direction: [torch.where(mask, direction[0] @ gram, 0.0)],
        [torch.where(mask, (weight - v) @ gram, 0.0)],
        [v],
        dot=lambda a, b: (a[0] * b[0]).sum(dim=-1, keepdim=True),
        done=lambda size, first: bool((size <= tolerance**2 * first).all()),
        steps=steps,
    )
    return found


def single_precision(metric: Metric, weight: Tensor) -> bool:
    """Return whether the search for a support may run in float32."""
    return weight.dtype != torch.float64 and metric.independence >= FLOAT32_SAFE


def sweep_dtype(metric: Metric, weight: Tensor) -> torch.dtype:
    """Return the dtype for the search of a support: float32 where that is precise enough."""
    return torch.float32 if single_precision(metric, weight) else torch.float64


def stacked(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return equilibrated moments (groups, d, d) and weights (groups, rows, d) of all groups.

    They are in `dtype`, or in float64 where the weights are.
    """
    kind = torch.float64 if problem.weight.dtype == torch.float64 else dtype
    grams = [m.gram.to(kind) for m in problem.metrics]
    weights = [
        m.scaled(w).to(kind) for m, (w, _) in zip(problem.metrics, problem.groups, strict=True)
    ]
    if len(grams) == 1:  # a view, not a copy
        return grams[0].unsqueeze(0), weights[0].unsqueeze(0)
    return torch.stack(grams), torch.stack(weights)


def typical_independence(grams: Tensor, kept: Tensor, rows: int) -> Tensor:
    """Estimate the share of each column's energy that a typical support cannot explain.

    Returns the geometric mean over a sample of rows, (groups, d).

    Args:
        grams: equilibrated moments, (groups, d, d).
        kept: supports, (groups, rows, d).
        rows: number of rows to sample in each group.
    """
    picked = torch.linspace(0, kept.shape[1] - 1, min(rows, kept.shape[1])).long().tolist()
    found = []
    for gram, masks in zip(grams, kept, strict=True):
        logs = [linalg.unexplained(gram, masks[row].nonzero().squeeze(1)).log() for row in picked]
        found.append(torch.stack(logs).mean(dim=0).exp() if logs else torch.ones_like(gram[0]))
    return torch.stack(found).to(grams)


def on_support(problem: Problem, mask: Tensor, near: Tensor | None = None) -> Solution:
    """Return the best weights on a given support.

    They come from one Cholesky per row in float64, or from conjugate gradients where that costs
    too much. Several processes share the rows.

    Args:
        problem: the layer problem.
        mask: the support, in the weight's shape.
        near: weights near the best, (groups, rows, d) in equilibrated units: a start for conjugate
            gradients, or the answer where they are best up to float32's last digits.
    """
    group = problem.context.group
    if group.size > 1:  # ties may be broken differently on another kind of processor
        mask = mask.clone(memory_format=torch.contiguous_format)
        group.broadcast(mask)
    shape = (len(problem.metrics), *problem.weight.shape[-2:])
    if is_narrow(*shape):
        weight = fit_together(problem.metrics, problem.weight, mask.view(shape))
        return finish(problem, weight, mask, damping=max(m.damping for m in problem.metrics))
    parts = []
    for g, (metric, (weight, _), kept) in enumerate(
        zip(problem.metrics, problem.groups, mask.view(shape), strict=True)
    ):
        start = None if near is None else near[g]
        solved = _solve(metric, metric.scaled(weight), kept, start, group)
        parts.append(metric.unscaled(solved, weight, kept))
    weight = torch.stack(parts).view(problem.weight.shape)
    return finish(problem, weight, mask, damping=max(m.damping for m in problem.metrics))


def near_support(problem: Problem, mask: Tensor, near: Tensor) -> Solution:
    """Return good weights on a support, by conjugate gradients: they will be refitted.

    Args:
        problem: the layer problem.
        mask: the support, in the weight's shape.
        near: weights near the best, (groups, rows, d) in equilibrated units.
    """
    gram, weight = stacked(problem)
    kept = mask.view(weight.shape)
    found = approach_least_squares(gram, weight, kept, near.to(weight), steps=20, tolerance=1e-3)
    parts = [
        metric.unscaled(values.to(metric.gram), own, rows)
        for metric, values, (own, _), rows in zip(
            problem.metrics, found, problem.groups, kept, strict=True
        )
    ]
    whole = torch.stack(parts).view(problem.weight.shape)
    return finish(problem, whole, mask, damping=max(m.damping for m in problem.metrics))


def _solve(
    metric: Metric, weight: Tensor, kept: Tensor, near: Tensor | None, group: ProcessGroup
) -> Tensor:
    """Solve one group's rows. They are independent, but one method is chosen for all of them."""
    work = float(kept.sum(dim=1, dtype=torch.float64).pow(3).sum()) / 6
    rows = len(kept)
    shared = group.size > 1 and work > _FEW
    if shared:
        own = group.shared_rows(rows).to(kept.device)
        weight, kept, near = weight[own], kept[own], None if near is None else near[own]
    solved = _solved_rows(metric.gram, weight, kept, near, work, metric.independence, group)
    return group.gathered_rows([solved], rows)[0] if shared else solved


def _solved_rows(
    gram: Tensor,
    weight: Tensor,
    kept: Tensor,
    near: Tensor | None,
    work: float,
    independence: float,
    group: ProcessGroup,
) -> Tensor:
    if near is not None and work > _FEW:
        near = torch.where(kept, near.to(gram), 0.0)
        excess = _excess(gram, weight, kept, near, independence, group)
        if excess <= _BEST:
            return near
        if excess <= _ROUNDING and work > _SOME:
            return approach_least_squares(gram, weight, kept, near, steps=5, tolerance=1e-2)
    if work < _MANY:
        return least_squares(gram, weight, kept)
    start = (weight if near is None else near).float()
    close = approach_least_squares(
        gram.float(), weight.float(), kept, start, steps=60, tolerance=1e-3
    )
    return approach_least_squares(gram, weight, kept, close.to(gram), steps=6)


def _excess(
    gram: Tensor,
    weight: Tensor,
    kept: Tensor,
    near: Tensor,
    independence: float,
    group: ProcessGroup,
) -> float:
    """Bound the relative excess of the error over the least on this support.

    It is gᵀ(G_SS)⁻¹g over the error, where g is half the gradient, for all rows of all processes.
    (G_SS)⁻¹ is bounded by the largest diagonal entry of G⁻¹.
    """
    change = weight - near
    pull = change @ gram
    slope, error = torch.where(kept, pull, 0.0).square().sum(), (pull * change).sum()
    slopes, errors = zip(*group.all_gather([float(slope), float(error)]), strict=True)
    return float(sum(slopes) / max(independence * sum(errors), torch.finfo(torch.float64).tiny))


def least_squares(gram: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Minimise (v − w) G (v − w)ᵀ for every row over v that vanish off the mask.

    The normal equations on a support S are G_SS v_S = (w G)_S: one Cholesky of |S|³/3 flops per
    row. A row with a singular G_SS gets its minimum-norm solution.

    Args:
        gram: G, (d, d).
        weight: the rows w, (rows, d).
        mask: True on each row's support.
    """
    wanted, out = weight @ gram, torch.zeros_like(weight)

    def work(rows: Tensor) -> None:
        index, real = listed(mask[rows])
        if index.shape[1]:
            solved = linalg.solve_blocks(
                blocks(gram, index, real), wanted[rows].gather(1, index) * real
            )
            out[rows] = out[rows].scatter_add(1, index, solved * real)

    by_rows(work, mask.sum(dim=1))
    return out


def weighted_error(problem: Problem, weight: Tensor) -> float:
    """Return the sum of the rows' errors, each multiplied by its importance."""
    return float((problem.row_errors_of(weight) * problem.importance).sum())
