"""What every solver needs once it knows which weights stay."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs._system.distributed import process_group
from lobs.solvers import linalg
from lobs.solvers.kernels.rows import blocks, by_rows, listed
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem, finish
from lobs.solvers.solution import Solution

# Below this independence float32 would lose the third digit of a loss; work then goes on in
# float64.
_FLOAT32_SAFE = 1e-4
# Multiply-adds of one Cholesky a row from which weights that are best already are left alone and
# processes share the rows; from which conjugate gradients are preferred where they start near, and
# where they do not.
_FEW, _SOME, _MANY = 1e6, 1e8, 2e10
# Share of the error that float32's digits may cost, at most: nothing to speak of, and what a few
# steps in float64 take off.
_BEST, _ROUNDING = 1e-5, 1e-3


def single_precision(metric: Metric, weight: Tensor) -> bool:
    """May the search for a support run in float32?"""
    return weight.dtype != torch.float64 and metric.independence >= _FLOAT32_SAFE


def sweep_dtype(metric: Metric, weight: Tensor) -> torch.dtype:
    """What a search for a support runs in: float32 where it may."""
    return torch.float32 if single_precision(metric, weight) else torch.float64


def stacked(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Equilibrated moments and weights of all groups, (groups, d, d) and (groups, rows, d); float64 where weights are."""
    kind = torch.float64 if problem.weight.dtype == torch.float64 else dtype
    grams = [m.gram.to(kind) for m in problem.metrics]
    weights = [
        m.scaled(w).to(kind) for m, (w, _) in zip(problem.metrics, problem.groups, strict=True)
    ]
    if len(grams) == 1:  # the one that there is, not a copy of it
        return grams[0].unsqueeze(0), weights[0].unsqueeze(0)
    return torch.stack(grams), torch.stack(weights)


def typical_independence(grams: Tensor, kept: Tensor, rows: int) -> Tensor:
    """About which share of each column's energy a typical support cannot explain, (groups, d): the mean over some rows."""
    picked = torch.linspace(0, kept.shape[1] - 1, min(rows, kept.shape[1])).long().tolist()
    found = []
    for gram, masks in zip(grams, kept, strict=True):
        logs = [linalg.unexplained(gram, masks[row].nonzero().squeeze(1)).log() for row in picked]
        found.append(torch.stack(logs).mean(dim=0).exp() if logs else torch.ones_like(gram[0]))
    return torch.stack(found).to(grams)


def on_support(problem: Problem, mask: Tensor, near: Tensor | None = None) -> Solution:
    """The best weights on a given support: one Cholesky a row in float64, or conjugate gradients where that is dear.

    `near`, (groups, rows, d) in equilibrated units, is where the latter start, and where they end
    if it is best already but for float32's last digits. Several processes share the rows.
    """
    if (
        process_group().size > 1
    ):  # another kind of processor may have chosen otherwise where two weights are as good
        mask = mask.clone(memory_format=torch.contiguous_format)
        process_group().broadcast(mask)
    shape = (len(problem.metrics), *problem.weight.shape[-2:])
    parts = []
    for g, (metric, (weight, _), kept) in enumerate(
        zip(problem.metrics, problem.groups, mask.view(shape), strict=True)
    ):
        solved = _solve(metric, metric.scaled(weight), kept, None if near is None else near[g])
        parts.append(metric.unscaled(solved, weight, kept))
    weight = torch.stack(parts).view(problem.weight.shape)
    return finish(problem, weight, mask, damping=max(m.damping for m in problem.metrics))


def _solve(metric: Metric, weight: Tensor, kept: Tensor, near: Tensor | None) -> Tensor:
    """One group's weights; rows are independent, but how they are solved is decided for all of them."""
    work = float(kept.sum(dim=1, dtype=torch.float64).pow(3).sum()) / 6
    group, rows = process_group(), len(kept)
    shared = group.size > 1 and work > _FEW
    if shared:
        mine = group.shared_rows(rows).to(kept.device)
        weight, kept, near = weight[mine], kept[mine], None if near is None else near[mine]
    solved = _solved_rows(metric.gram, weight, kept, near, work, metric.independence)
    return group.gathered_rows([solved], rows)[0] if shared else solved


def _solved_rows(
    gram: Tensor,
    weight: Tensor,
    kept: Tensor,
    near: Tensor | None,
    work: float,
    independence: float,
) -> Tensor:
    if near is not None and work > _FEW:
        near = torch.where(kept, near.to(gram), 0.0)
        excess = _excess(gram, weight, kept, near, independence)
        if excess <= _BEST:
            return near
        if excess <= _ROUNDING and work > _SOME:
            return linalg.conjugate_gradients(gram, weight, kept, near, steps=5, tolerance=1e-2)
    if work < _MANY:
        return least_squares(gram, weight, kept)
    start = (weight if near is None else near).float()
    close = linalg.conjugate_gradients(
        gram.float(), weight.float(), kept, start, steps=60, tolerance=1e-3
    )
    return linalg.conjugate_gradients(gram, weight, kept, close.to(gram), steps=6)


def _excess(gram: Tensor, weight: Tensor, kept: Tensor, near: Tensor, independence: float) -> float:
    """By which share the error may be above the least on this support: gᵀ(G_SS)⁻¹g over it, g being half the gradient.

    All rows of all processes together. (G_SS)⁻¹ is taken for the largest that any column's own part
    of G⁻¹ is.
    """
    change = weight - near
    pull = change @ gram
    slope, error = torch.where(kept, pull, 0.0).square().sum(), (pull * change).sum()
    slopes, errors = zip(*process_group().all_gather([float(slope), float(error)]), strict=True)
    return float(sum(slopes) / max(independence * sum(errors), torch.finfo(torch.float64).tiny))


def least_squares(gram: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Minimise (v − w) G (v − w)ᵀ for every row over v that vanish off the mask.

    The normal equations on a support S are G_SS v_S = (w G)_S: one Cholesky solve of |S|³/3 flops a
    row. A row whose G_SS is singular gets its minimum-norm solution.
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
    """Errors of all rows, each by its importance."""
    return float((problem.row_errors_of(weight) * problem.importance).sum())
