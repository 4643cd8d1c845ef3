"""Prune by a sweep with a shared column order (SparseGPT family; Frantar, Alistarh 2023).

This is our own implementation. Columns are visited once, left to right, in the same order for every
row. So one Cholesky factor of Ψ⁻¹ serves all rows. Row j of the upper factor U compensates column j
by later columns only. Weights are chosen by w_j²/U_jj², their true cost at that step. Unstructured
weights are chosen in blocks of `block` columns, n:m in groups of m.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)


def column_sweep(
    weight: Tensor,
    moment: Tensor,
    sparsity: float | None = None,
    pattern: tuple[int, int] | None = None,
    *,
    block: int = 128,
    damping: float = 0.01,
) -> Tensor:
    """Prune [rows, d] weights to a sparsity, or to n kept of every m columns.

    `damping` is relative to Ψ's mean diagonal. ⌊sparsity · weights + ½⌋ weights are removed, block
    by block. A last group of r < m columns keeps ⌈n·r/m⌉.
    """
    if (sparsity is None) == (pattern is None):
        raise ValueError("give either sparsity or pattern")
    d = weight.shape[1]
    factor = _factor(moment, damping).to(weight.dtype)
    w = torch.where(moment.diagonal() == 0, 0.0, weight).to(weight.dtype)
    mask = torch.ones_like(w, dtype=torch.bool)
    for left in range(0, d, block):
        right = min(d, left + block)
        w[:, right:] -= (
            _sweep_block(w, factor, mask, left, right, sparsity, pattern)
            @ factor[left:right, right:]
        )
    return torch.where(mask, w, 0.0)


def best_column_sweep(
    weight: Tensor,
    moment: Tensor,
    sparsity: float | None = None,
    pattern: tuple[int, int] | None = None,
    *,
    block: int = 128,
) -> Tensor:
    """Run the sweep with five dampings and return the result of least error.

    This is fairer than its usual fixed damping of 0.01.
    """
    tried = []
    for damping in DAMPINGS:
        with suppress(torch.linalg.LinAlgError):  # too little damping for a singular Ψ
            tried.append(
                column_sweep(weight, moment, sparsity, pattern, block=block, damping=damping)
            )
    return min(tried, key=lambda v: _error(v - weight, moment))


def _sweep_block(
    w: Tensor,
    factor: Tensor,
    mask: Tensor,
    left: int,
    right: int,
    sparsity: float | None,
    pattern: tuple[int, int] | None,
) -> Tensor:
    """Sweep columns left … right in place; return the corrections due in later blocks."""
    owed = w.new_zeros(len(w), right - left)
    pivot = factor.diagonal()
    if sparsity is not None:
        cost = (w[:, left:right] / pivot[left:right]).square()
        so_far, upto = (int(sparsity * len(w) * c + 0.5) for c in (left, right))
        gone = cost.flatten().argsort(stable=True)[: upto - so_far]
        chosen = torch.ones(cost.numel(), dtype=torch.bool)
        chosen[gone] = False
        mask[:, left:right] = chosen.view_as(cost)
    for j in range(left, right):
        if pattern is not None and j % pattern[1] == 0:
            _choose_group(w, pivot, mask, j, pattern)
        owed[:, j - left] = torch.where(mask[:, j], 0.0, w[:, j] / pivot[j])
        w[:, j:right] -= owed[:, j - left, None] * factor[j, j:right]
    return owed


def _choose_group(w: Tensor, pivot: Tensor, mask: Tensor, j: int, pattern: tuple[int, int]) -> None:
    n, m = pattern
    group = slice(j, min(w.shape[1], j + m))
    r = len(pivot[group])
    cost = (w[:, group] / pivot[group]).square()
    gone = cost.argsort(dim=1, stable=True)[:, : r - -(-n * r // m)]
    mask[:, group] = mask[:, group].scatter(1, gone, False)


def _factor(moment: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of (Ψ + λI)⁻¹, with a unit diagonal for dead columns."""
    psi = moment.to(torch.float64).clone()
    diagonal = psi.diagonal()
    dead = diagonal == 0
    diagonal += damping * float(diagonal.mean())
    diagonal[dead] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(psi))
    return torch.linalg.cholesky(inverse, upper=True)


def _error(delta: Tensor, moment: Tensor) -> float:
    delta = delta.to(torch.float64)
    return float(((delta @ moment.to(torch.float64)) * delta).sum())
