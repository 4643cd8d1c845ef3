"""Greedy OBS compiled for CPUs with numba: blocked, right-looking, a row at a time per thread.

Each row has its own copy of A. Pivots come in panels of 32. Inside a panel only the needed columns
are formed (left-looking). Then the remaining square gets one rank-32 update. Removed positions are
first filled from the end, so that the square stays dense and contiguous. Four rows by eight factors
are kept in registers, and tiles of columns in the first-level cache. A row costs d³/3
multiply-adds, at nearly the speed of a matrix product (`benchmarks/greedy_speed.py`).

Threads are plain Python threads around a kernel without the GIL. A second threading runtime would
compete with torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lobs._system.context import workers
from lobs._system.progress import track
from lobs.solvers.kernels import Quota
from lobs.solvers.kernels.compiling import compiled, helper, inlined, spans

_PANEL = 32  # a multiple of 8, see _downdate
_TILE = 256
# The weight of a removed position. Its score of 1e36 is never the least, and fits into float32.
_REMOVED = 1e18
_LOCKED = 1e30  # added to the score of a position whose group has met its quota


def greedy_rows(
    inverse: Tensor, weight: Tensor, protected: int, quota: Quota, label: str
) -> tuple[Tensor, Tensor]:
    """Run `lobs.solvers.kernels.greedy` on CPU tensors."""
    rows = len(weight)
    steps = int(quota.allowed.sum())
    order = np.empty((rows, steps), np.int32)
    losses = np.empty((rows, steps), weight.numpy().dtype)
    a, w = inverse.numpy(), weight.contiguous().numpy()
    group, allowed = quota.group.numpy(), quota.allowed.numpy()
    pieces = spans(rows)
    if len(pieces) < 2:  # starting a thread would take longer than the work
        _greedy_span(a, w, protected, group, allowed, order, losses)
        return torch.from_numpy(order), torch.from_numpy(losses)
    with track(label, rows) as advance:
        jobs = [
            workers().submit(
                _greedy_span, a, w[lo:hi], protected, group, allowed, order[lo:hi], losses[lo:hi]
            )
            for lo, hi in pieces
        ]
        for job, (lo, hi) in zip(jobs, pieces, strict=True):
            job.result()
            advance(hi - lo)
    return torch.from_numpy(order), torch.from_numpy(losses)


@compiled
def _greedy_span(inverse, weight, protected, group, allowed, order, losses):
    # Copies are written as loops: an assignment of slices takes three seconds to compile, because
    # it also compiles the text of its error message.
    d, steps = weight.shape[1], order.shape[1]
    a, u = np.empty((d, d), weight.dtype), np.empty((_PANEL, d), weight.dtype)
    w, diag, lock = (
        np.empty(d, weight.dtype),
        np.empty(d, weight.dtype),
        np.empty(d, weight.dtype),
    )
    column_of, removed = np.empty(d, np.int64), np.empty(_PANEL, np.int64)
    left = np.empty(len(allowed), np.int64)
    for row in range(weight.shape[0]):
        for g in range(len(allowed)):
            left[g] = allowed[g]
        for i in range(d):
            for j in range(d):
                a[i, j] = inverse[i, j]
            w[i], diag[i], column_of[i] = weight[row, i], inverse[i, i], i
            lock[i] = 0 if left[group[i]] > 0 else _LOCKED
        alive = d
        for start in range(0, steps, _PANEL):
            panel = min(_PANEL, steps - start)
            for t in range(panel):
                q = _least_important(w, diag, lock, protected, alive)
                order[row, start + t] = column_of[q]
                losses[row, start + t] = _delete(a[q], u, t, q, w, diag, removed, alive)
                _count_off(group, left, lock, column_of, column_of[q], alive)
            if panel == _PANEL:
                _sort(removed)
                alive = _fill_holes(a, u, w, diag, lock, column_of, removed, alive)
                _downdate(a, u, alive)


@helper
def _least_important(w, diag, lock, protected, alive):
    least = w[protected] * w[protected] / diag[protected] + lock[protected]
    for j in range(protected, alive):  # a plain minimum vectorises, an argmin does not
        least = min(least, w[j] * w[j] / diag[j] + lock[j])
    for j in range(protected, alive):
        if w[j] * w[j] / diag[j] + lock[j] <= least:
            return j
    # Rounding may differ between the two loops: fall back to a plain argmin.
    best = protected
    for j in range(protected, alive):
        if lock[j] < lock[best] or (
            lock[j] == lock[best] and w[j] * w[j] * diag[best] < w[best] * w[best] * diag[j]
        ):
            best = j
    return best


@inlined
def _count_off(group, left, lock, column_of, column, alive):
    """Count a deletion, and lock the rest of the column's group if its quota is met."""
    left[group[column]] -= 1
    if left[group[column]] == 0:
        for j in range(alive):
            if group[column_of[j]] == group[column]:
                lock[j] = _LOCKED


@helper
def _delete(row, u, t, q, w, diag, removed, alive):
    """Form the panel's t-th factor from row q of A, move the weights and return the loss."""
    c = u[t]
    for j in range(alive):
        c[j] = row[j]
    s = 0
    while s + 4 <= t:
        f0, f1, f2, f3 = u[s, q], u[s + 1, q], u[s + 2, q], u[s + 3, q]
        u0, u1, u2, u3 = u[s], u[s + 1], u[s + 2], u[s + 3]
        for j in range(alive):
            c[j] -= f0 * u0[j] + f1 * u1[j] + f2 * u2[j] + f3 * u3[j]
        s += 4
    while s < t:
        f0, u0 = u[s, q], u[s]
        for j in range(alive):
            c[j] -= f0 * u0[j]
        s += 1
    for k in range(t):
        c[removed[k]] = 0
    pivot = c[q]
    root = np.sqrt(pivot)
    step = w[q] / root
    loss = step * step
    for j in range(alive):
        x = c[j] / root
        c[j] = x
        diag[j] -= x * x
        w[j] -= step * x
    removed[t] = q
    diag[q] = 1
    w[q] = _REMOVED
    return loss


@helper
def _fill_holes(a, u, w, diag, lock, column_of, holes, alive):
    """Move the last remaining positions into the removed ones, which are sorted."""
    left = alive - len(holes)
    moves = 0
    sources = np.empty(len(holes), np.int64)
    last, top = alive - 1, len(holes) - 1
    while moves < len(holes) and holes[moves] < left:
        while top >= 0 and holes[top] == last:
            last -= 1
            top -= 1
        sources[moves] = last
        last -= 1
        moves += 1
    for k in range(moves):
        to, source = holes[k], sources[k]
        w[to], diag[to], lock[to], column_of[to] = (
            w[source],
            diag[source],
            lock[source],
            column_of[source],
        )
        for s in range(_PANEL):
            u[s, to] = u[s, source]
        for j in range(alive):
            a[to, j] = a[source, j]
    for i in range(left):
        for k in range(moves):
            a[i, holes[k]] = a[i, sources[k]]
    return left


@inlined
def _sort(numbers):
    """Sort by insertion: numba's own sort takes a second to compile."""
    for i in range(1, len(numbers)):
        number = numbers[i]
        j = i - 1
        while j >= 0 and numbers[j] > number:
            numbers[j + 1] = numbers[j]
            j -= 1
        numbers[j + 1] = number


@inlined
def _downdate(a, u, alive):
    """Subtract UᵀU from the remaining square, eight factors at a time."""
    for left in range(0, alive, _TILE):
        right = min(alive, left + _TILE)
        for s in range(0, _PANEL, 8):
            i = np.int64(0)
            while i + 4 <= alive:
                _update_four(a, u, i, s, left, right)
                i += 4
            while i < alive:
                _update_one(a, u, i, s, left, right)
                i += 1


# Each row is sliced from the whole array, so that numba knows it is contiguous and vectorises.


@helper
def _update_four(a, u, i, s, left, right):
    u0, u1, u2, u3 = (
        u[s, left:right],
        u[s + 1, left:right],
        u[s + 2, left:right],
        u[s + 3, left:right],
    )
    u4, u5, u6, u7 = (
        u[s + 4, left:right],
        u[s + 5, left:right],
        u[s + 6, left:right],
        u[s + 7, left:right],
    )
    r0, r1, r2, r3 = (
        a[i, left:right],
        a[i + 1, left:right],
        a[i + 2, left:right],
        a[i + 3, left:right],
    )
    a0, a1, a2, a3, a4, a5, a6, a7 = _eight(u, s, i)
    b0, b1, b2, b3, b4, b5, b6, b7 = _eight(u, s, i + 1)
    c0, c1, c2, c3, c4, c5, c6, c7 = _eight(u, s, i + 2)
    d0, d1, d2, d3, d4, d5, d6, d7 = _eight(u, s, i + 3)
    for j in range(right - left):
        x0, x1, x2, x3, x4, x5, x6, x7 = u0[j], u1[j], u2[j], u3[j], u4[j], u5[j], u6[j], u7[j]
        r0[j] -= a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3 + a4 * x4 + a5 * x5 + a6 * x6 + a7 * x7
        r1[j] -= b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3 + b4 * x4 + b5 * x5 + b6 * x6 + b7 * x7
        r2[j] -= c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3 + c4 * x4 + c5 * x5 + c6 * x6 + c7 * x7
        r3[j] -= d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3 + d4 * x4 + d5 * x5 + d6 * x6 + d7 * x7


@helper
def _update_one(a, u, i, s, left, right):
    u0, u1, u2, u3 = (
        u[s, left:right],
        u[s + 1, left:right],
        u[s + 2, left:right],
        u[s + 3, left:right],
    )
    u4, u5, u6, u7 = (
        u[s + 4, left:right],
        u[s + 5, left:right],
        u[s + 6, left:right],
        u[s + 7, left:right],
    )
    r0 = a[i, left:right]
    a0, a1, a2, a3, a4, a5, a6, a7 = _eight(u, s, i)
    for j in range(right - left):
        x0, x1, x2, x3, x4, x5, x6, x7 = u0[j], u1[j], u2[j], u3[j], u4[j], u5[j], u6[j], u7[j]
        r0[j] -= a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3 + a4 * x4 + a5 * x5 + a6 * x6 + a7 * x7


@helper
def _eight(u, s, i):
    return (
        u[s, i],
        u[s + 1, i],
        u[s + 2, i],
        u[s + 3, i],
        u[s + 4, i],
        u[s + 5, i],
        u[s + 6, i],
        u[s + 7, i],
    )
