"""Swaps within groups, compiled for CPUs with numba: each thread works on one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lobs._system.context import workers
from lobs.solvers.kernels.compiling import compiled, helper

if TYPE_CHECKING:
    from lobs.solvers.kernels import Swaps


def swap_rows(state: Swaps, worth: float) -> Tensor:
    """Run `lobs.solvers.kernels.swap` on CPU tensors."""
    mask = state.mask.clone().contiguous()
    arrays = [
        t.contiguous().numpy()
        for t in (
            state.inverse,
            state.kept,
            mask,
            state.y.clone(),
            state.diagonal.clone(),
        )
    ]
    pairs = [t.contiguous().numpy() for t in (state.off.clone(), state.p, state.q)]
    gram, group, error = state.gram.contiguous().numpy(), state.group.numpy(), state.error.numpy()
    list(
        workers().map(
            lambda r: _swap_row(
                gram, group, (worth, error[r]), *(a[r] for a in arrays), tuple(a[r] for a in pairs)
            ),
            range(len(mask)),
        )
    )
    return mask


@compiled
def _swap_row(gram, group, gain, inverse, kept, mask, y, diagonal, pairs):
    worth, error = gain
    off, p, q = pairs
    d = len(y)
    start = mask.copy()
    most = group.max() + 1
    past = np.empty((2 * most, d), y.dtype)
    sign = np.empty(2 * most, y.dtype)
    shut = np.zeros(most, np.bool_)
    x, m = np.zeros(d, y.dtype), np.empty(d, y.dtype)
    done = 0
    while done < 2 * most:
        at = _best_pair(group, shut, y, diagonal, off, p, q, -worth * error)
        if at < 0:
            break
        a, b = p[at], q[at]
        for column in (b, a):
            _column(gram, inverse, kept, start, column, past, sign, done, x, m)
            _pivot(column, past[done], sign, done, m, y, diagonal, off, p, q)
            done += 1
        mask[a], mask[b] = False, True
        shut[group[a]] = True


@helper
def _best_pair(group, shut, y, diagonal, off, p, q, least):
    best = -1
    for i in range(len(p)):
        if not shut[group[p[i]]]:
            into, u = diagonal[q[i]], off[i]
            step = y[q[i]] / into
            rest = y[p[i]] - u * step
            change = rest * rest / (u * u / into - diagonal[p[i]]) - step * step * into
            if change < least:
                best, least = i, change
    return best


@helper
def _column(gram, inverse, kept, start, column, past, sign, done, x, m):
    """Form the current column of M: from the inverse at the start, minus all updates since."""
    g = gram[column]
    s = len(kept)
    x[:] = 0
    if start[column]:
        at = np.searchsorted(kept, column)
        for i in range(s):
            x[kept[i]] = inverse[at, i]
    else:
        asked = g[kept]
        for i in range(s):
            x[kept[i]] = _dot(inverse[i], asked)
    for j in range(len(m)):
        if start[j]:
            m[j] = -x[j] if start[column] else x[j]
        else:
            pull = _dot(gram[j], x)
            m[j] = pull if start[column] else g[j] - pull
    for t in range(done):
        z = past[t]
        f = sign[t] * z[column]
        for j in range(len(m)):
            m[j] -= f * z[j]


@helper
def _pivot(column, z, sign, done, m, y, diagonal, off, p, q):
    pivot = m[column]
    root = np.sqrt(abs(pivot))
    sign[done] = 1 if pivot > 0 else -1
    step = y[column] / pivot
    for j in range(len(m)):
        z[j] = m[j] / root
        y[j] -= m[j] * step
        diagonal[j] -= sign[done] * z[j] * z[j]
    for i in range(len(p)):
        off[i] -= sign[done] * z[p[i]] * z[q[i]]


@helper
def _dot(a, b):
    total = a[0] * 0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total
