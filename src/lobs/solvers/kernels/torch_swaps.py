"""Local search on small least-squares problems with batched torch operations: any device, and the reference.

The state of a row is its swept matrix T and vector b. Sweeping a variable in or out is one
symmetric rank-one step; with the set S swept in, T and b hold everything a decision needs: for q
outside, T_qq is the energy of q that S cannot explain and b_q its residual correlation, so adding q
gains b_q²/T_qq; for p inside, −T_pp is the diagonal of the inverse on S and b_p the weight, so
dropping p costs b_p²/(−T_pp); T_pq is how p's weight answers to q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def start(t: Tensor, b: Tensor, inside: Tensor, label: str) -> None:
    """Sweep in, row by row, what is inside; in place."""
    rows = torch.arange(len(t), device=t.device)
    for column in range(t.shape[1]):
        chosen = rows[inside[:, column]]
        if len(chosen):
            _sweep(t, b, chosen, torch.full_like(chosen, column), adding=True)


def finish(t: Tensor, b: Tensor, inside: Tensor, rows: Tensor, least: float, label: str) -> int:
    """Take the best swap in every one of `rows` until none gains more than the share `least`; in place. Returns how many."""
    moves = 0
    for _ in range(4 * t.shape[1]):
        if not len(rows):
            break
        gain, q, p = _best_swap(t[rows], b[rows], inside[rows], least)
        better = gain > 0
        rows, q, p = rows[better], q[better], p[better]
        _sweep(t, b, rows, q, adding=True)
        _sweep(t, b, rows, p, adding=False)
        inside[rows, q], inside[rows, p] = True, False
        moves += len(rows)
    return moves


def move(t: Tensor, b: Tensor, rows: Tensor, columns: Tensor, adding: bool) -> None:
    """Sweep one variable of each of `rows` in or out; in place."""
    _sweep(t, b, rows, columns, adding=adding)


def _best_swap(t: Tensor, b: Tensor, inside: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor]:
    diagonal = t.diagonal(dim1=1, dim2=2)
    outside = ~inside & (diagonal > 1e-7)
    pivot = torch.where(outside, diagonal, 1.0)
    entering = b / pivot
    gain = torch.where(outside, b * entering, 0.0)
    weight = b.unsqueeze(1) - entering.unsqueeze(2) * t  # [row, q, p]: p's weight once q is in
    inverse = t.square() / pivot.unsqueeze(2) - diagonal.unsqueeze(1)
    loss = torch.where(inside.unsqueeze(1), weight.square() / inverse, torch.inf)
    cheapest, p = loss.min(dim=2)
    net = torch.where(outside, gain - cheapest, -torch.inf)
    net = torch.where(net > least * gain, net, 0.0)
    best, q = net.max(dim=1)
    return best, q, p.gather(1, q.unsqueeze(1)).squeeze(1)


def _sweep(t: Tensor, b: Tensor, rows: Tensor, k: Tensor, *, adding: bool) -> None:
    part, at = t[rows], torch.arange(len(rows), device=t.device)
    row, bk = part[at, k], b[rows, k]
    pivot = row[at, k].unsqueeze(1)
    factor = row / pivot
    fresh = part - factor.unsqueeze(2) * row.unsqueeze(1)
    new_b = b[rows] - factor * bk.unsqueeze(1)
    edge = factor if adding else -factor
    fresh[at, k], fresh[at, :, k] = edge, edge
    fresh[at, k, k] = -1 / pivot.squeeze(1)
    new_b[at, k] = (bk if adding else -bk) / pivot.squeeze(1)
    t[rows], b[rows] = fresh, new_b
