"""Local search on small least-squares problems, compiled for CPUs: `torch_swaps` row by row."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lobs._system.context import workers
from lobs._system.progress import track
from lobs.solvers.kernels.compiling import compiled, helper, inlined, spans

_SMALL = 2**15  # matrix elements in all rows; below, threads cost more than they save


def start(t: Tensor, b: Tensor, inside: Tensor, label: str) -> None:
    """Sweep in the variables inside, like `torch_swaps.start`."""
    rows = torch.arange(len(t))
    _by_threads(_start_span, t, b, inside, rows, label)


def finish(t: Tensor, b: Tensor, inside: Tensor, rows: Tensor, least: float, label: str) -> int:
    """Make swaps while they help, like `torch_swaps.finish`."""
    return sum(_by_threads(_swap_span, t, b, inside, rows, label, least))


def move(t: Tensor, b: Tensor, rows: Tensor, columns: Tensor, adding: bool) -> None:
    """Sweep one variable per row, like `torch_swaps.move`."""
    _move_span(t.numpy(), b.numpy(), rows.numpy(), columns.numpy(), adding)


def _by_threads(
    work: Any, t: Tensor, b: Tensor, inside: Tensor, rows: Tensor, label: str, *rest: float
) -> list[int]:
    arrays = t.numpy(), b.numpy(), inside.numpy()
    if len(rows) * t.shape[1] ** 2 < _SMALL:
        return [work(*arrays, rows.numpy(), *rest)]
    with track(label, len(rows)) as advance:
        parts = spans(len(rows))
        jobs = [
            workers().submit(partial(work, *arrays, rows[low:high].numpy(), *rest))
            for low, high in parts
        ]
        out: list[int] = []
        for job, (low, high) in zip(jobs, parts, strict=True):
            out.append(job.result())
            advance(high - low)
    return out


@compiled
def _start_span(t, b, inside, rows):
    for row in rows:
        for k in range(t.shape[1]):
            if inside[row, k]:
                _sweep(t[row], b[row], k, True)
    return 0


@compiled
def _swap_span(t, b, inside, rows, least):
    moves = 0
    for row in rows:
        moves += _swap_row(t[row], b[row], inside[row], least)
    return moves


@compiled
def _move_span(t, b, rows, columns, adding):
    for i in range(len(rows)):
        _sweep(t[rows[i]], b[rows[i]], columns[i], adding)


@inlined
def _swap_row(t, b, inside, least):
    m = t.shape[0]
    for moves in range(4 * m):
        best, enters, leaves = 0.0, np.int64(-1), np.int64(-1)
        for q in range(m):
            if inside[q] or t[q, q] <= 1e-7:
                continue
            weight = b[q] / t[q, q]
            gain = b[q] * weight
            if gain <= best:
                continue
            p, loss = _cheapest(t, b, inside, q, weight)
            if p >= 0 and gain - loss > best and gain - loss > least * gain:
                best, enters, leaves = gain - loss, q, p
        if enters < 0:
            return moves
        _sweep(t, b, enters, True)
        _sweep(t, b, leaves, False)
        inside[enters], inside[leaves] = True, False
    return 4 * m


@helper
def _cheapest(t, b, inside, q, weight):
    """Find the variable that is cheapest to drop once q is in with this weight, and its cost."""
    answer, pivot = t[q], t[q, q]
    best, loss = -1, np.inf
    for p in range(t.shape[0]):
        if inside[p]:
            left = b[p] - weight * answer[p]
            cost = left * left / (answer[p] * answer[p] / pivot - t[p, p])
            if cost < loss:
                best, loss = p, cost
    return best, loss


@helper
def _sweep(t, b, k, adding):
    m = t.shape[0]
    row, bk = t[k].copy(), b[k]
    pivot = row[k]
    for i in range(m):
        factor = row[i] / pivot
        if i != k and factor != 0:
            line = t[i]
            for j in range(m):
                line[j] -= factor * row[j]
            b[i] -= factor * bk
    sign = 1.0 if adding else -1.0
    for j in range(m):
        t[k, j] = sign * row[j] / pivot
        t[j, k] = t[k, j]
    t[k, k] = -1 / pivot
    b[k] = sign * bk / pivot
