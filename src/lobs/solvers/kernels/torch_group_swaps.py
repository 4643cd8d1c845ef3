"""Swaps within groups in plain torch: any device, and the reference for the compiled kernel.

All rows take their steps together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lobs.solvers.kernels import Swaps


def swap_rows(state: Swaps, worth: float) -> Tensor:
    """Run `lobs.solvers.kernels.swap` with torch operations."""
    mask, y, diagonal, off = (
        state.mask.clone(),
        state.y.clone(),
        state.diagonal.clone(),
        state.off.clone(),
    )
    unswapped = torch.ones_like(off, dtype=torch.bool)
    past, signs = y.new_zeros(len(y), 0, y.shape[1]), y.new_zeros(len(y), 0)
    while True:
        change, p, q = _best_pair(state, y, diagonal, off, unswapped)
        moving = change < -worth * state.error
        if not bool(moving.any()):
            return mask
        for column in (q, p):
            m = _column(state, column, past, signs)
            pivot = m.gather(1, column)
            z = torch.where(
                moving.unsqueeze(1), m * pivot.abs().rsqrt(), 0.0
            )  # finished rows do not move
            y -= z * (y.gather(1, column) * pivot.sign() * pivot.abs().rsqrt())
            diagonal -= pivot.sign() * z.square()
            off -= pivot.sign() * z.gather(1, state.p) * z.gather(1, state.q)
            past, signs = (
                torch.cat([past, z.unsqueeze(1)], dim=1),
                torch.cat([signs, pivot.sign()], dim=1),
            )
        mask.scatter_(1, p, mask.gather(1, p) & ~moving.unsqueeze(1)).scatter_(
            1, q, mask.gather(1, q) | moving.unsqueeze(1)
        )
        unswapped &= (state.group[state.p] != state.group[p]) | ~moving.unsqueeze(1)


def _best_pair(
    state: Swaps, y: Tensor, diagonal: Tensor, off: Tensor, unswapped: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    into = diagonal.gather(1, state.q)
    step = y.gather(1, state.q) / into
    out = off.square() / into - diagonal.gather(1, state.p)
    change = (y.gather(1, state.p) - off * step).square() / out - step.square() * into
    least, at = torch.where(unswapped, change, torch.inf).min(dim=1, keepdim=True)
    return least.squeeze(1), state.p.gather(1, at), state.q.gather(1, at)


def _column(state: Swaps, column: Tensor, past: Tensor, signs: Tensor) -> Tensor:
    """Return the current column of M: from the inverse at the start, minus all updates since."""
    g = state.gram[column.squeeze(1)]
    inside = state.mask.gather(1, column)
    asked = torch.where(inside, (state.kept == column).to(g.dtype), g.gather(1, state.kept))
    x = torch.zeros_like(g).scatter_(1, state.kept, (state.inverse @ asked.unsqueeze(2)).squeeze(2))
    pull = x @ state.gram
    m = torch.where(inside, torch.where(state.mask, -x, pull), torch.where(state.mask, x, g - pull))
    factor = signs * past.gather(2, column.unsqueeze(1).expand(-1, past.shape[1], 1)).squeeze(2)
    return m - (factor.unsqueeze(1) @ past).squeeze(1)
