"""Greedy OBS in plain torch: any device, any float type, and the reference for the compiled kernel.

It is left-looking: it does not downdate a d×d inverse per row, but keeps the factor rows U and
forms only the column it needs, A[q] − U[:, q]ᵀU. A row costs Σ t·d multiply-adds and d² memory.
Rows are batched to a fixed amount of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lobs._system.progress import track
from lobs.solvers.kernels import Quota

_BATCH_ELEMENTS = 2**26  # factor entries alive at once: 256 MB in float32


def greedy_rows(
    inverse: Tensor, weight: Tensor, protected: int, quota: Quota, label: str
) -> tuple[Tensor, Tensor]:
    """Run `lobs.solvers.kernels.greedy` with torch operations."""
    rows, d = weight.shape
    steps = int(quota.allowed.sum())
    order = torch.empty(rows, steps, dtype=torch.int32, device=weight.device)
    losses = torch.empty(rows, steps, dtype=weight.dtype, device=weight.device)
    batch = max(1, _BATCH_ELEMENTS // max(1, steps * d))
    with track(label, rows) as advance:
        for start in range(0, rows, batch):
            part = slice(start, start + batch)
            order[part], losses[part] = _greedy_batch(
                inverse, weight[part].clone(), protected, quota
            )
            advance(len(order[part]))
    return order, losses


def _greedy_batch(
    inverse: Tensor, w: Tensor, protected: int, quota: Quota
) -> tuple[Tensor, Tensor]:
    rows, d = w.shape
    steps = int(quota.allowed.sum())
    group, left = quota.group.to(w.device), quota.allowed.to(w.device).repeat(rows, 1)
    diag = inverse.diagonal().expand(rows, d).clone()
    alive = torch.ones(rows, d, dtype=torch.bool, device=w.device)
    alive[:, :protected] = False
    factor = w.new_zeros(rows, steps, d)
    order = torch.empty(rows, steps, dtype=torch.int32, device=w.device)
    losses = w.new_empty(rows, steps)
    every = torch.arange(rows, device=w.device)
    for t in range(steps):
        score = torch.where(alive & (left[:, group] > 0), w.square() / diag, torch.inf)
        q = score.argmin(dim=1)
        done = factor[:, :t]
        column = inverse[q] - torch.einsum("rt,rtd->rd", done[every, :, q], done)
        pivot = column[every, q].unsqueeze(1)
        losses[:, t] = w[every, q].square() / pivot.squeeze(1)
        order[:, t] = q
        u = column * pivot.rsqrt()
        w -= (w[every, q].unsqueeze(1) * pivot.rsqrt()) * u
        diag -= u.square()
        factor[:, t] = u
        alive[every, q] = False
        left[every, group[q]] -= 1
    return order, losses
