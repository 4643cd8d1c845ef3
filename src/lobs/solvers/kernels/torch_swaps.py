"""Local search on small least-squares problems in batched torch operations, the reference backend.

The state of a row is its swept matrix T and vector b. Sweeping a variable in or out is one
symmetric rank-one step. With the set S swept in, T and b give the effect of every move:

- For q outside, T_qq is the energy of q that S cannot explain, and b_q its residual correlation.
  Adding q gains b_q²/T_qq.
- For p inside, −T_pp is the diagonal of the inverse on S, and b_p is the weight. Dropping p costs
  b_p²/(−T_pp).
- T_pq is the change of p's weight per unit of q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def start(t: Tensor, b: Tensor, inside: Tensor, label: str) -> None:
    """Sweep in the variables inside each row's support, in place.

    Args:
        t: the rows' matrices.
        b: the rows' linear terms.
        inside: the supports.
        label: the name of the progress bar.
    """
    rows = torch.arange(len(t), device=t.device)
    for column in range(t.shape[1]):
        chosen = rows[inside[:, column]]
        if len(chosen):
            _sweep(t, b, chosen, torch.full_like(chosen, column), adding=True)


def finish(t: Tensor, b: Tensor, inside: Tensor, rows: Tensor, least: float, label: str) -> int:
    """Make the best swap in every row while it helps, in place, and return the number of swaps.

    Args:
        t: the rows' matrices.
        b: the rows' linear terms.
        inside: the supports.
        rows: the rows to work on.
        least: smallest net gain of a swap, relative to the gain of the entering variable.
        label: the name of the progress bar.
    """
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
    """Sweep one variable per row in or out, in place.

    Args:
        t: the rows' matrices.
        b: the rows' linear terms.
        rows: the rows to change.
        columns: the variable of each row.
        adding: whether to sweep in or out.
    """
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
