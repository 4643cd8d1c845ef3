"""Sparse layers compiled for CPUs with numba.

Results are exact up to the order of float32 sums, for finite inputs. Matrices are rows of (column,
value). All indices are uint32, which saves a test for negative indices in every step. With one
input, each weight is one gather. Many inputs are first transposed to [features, batch], so that the
loop over the batch is contiguous and vectorises. A chain of layers keeps that layout to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_TILE = 64
_1, _2, _3, _4, _SHORT = (np.uint32(n) for n in (1, 2, 3, 4, 48))


def _compile(function: Callable[..., Any]) -> Any:
    """Compile a kernel that releases the GIL, and cache its machine code on disk.

    Where no folder is writable, every process compiles it again.
    """
    # Multiply-adds may be fused. NaN and infinity must be handled. The order of sums is explicit.
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "nsz"},
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba raises it where no cache folder is writable
        return numba.njit(**options)(function)


@_compile
def chain_of_one(x, starts, columns, values, bias, widths, relu, out):
    """Run a chain of sparse layers on one input: x [features] to out [units]."""
    layers = len(relu)
    here, row = x, 0
    for layer in range(layers):
        width = widths[layer + 1]
        there = out if layer == layers - 1 else np.empty(width, np.float32)
        _gather(
            here,
            starts[row : row + width + 1],
            columns,
            values,
            bias[row : row + width],
            relu[layer],
            there,
        )
        here = there
        row += width


@_compile
def _gather(x, starts, columns, values, bias, relu, out):
    lowest = np.float32(0) if relu else np.float32(-np.inf)
    start = starts[0]
    for unit in range(len(out)):
        stop = starts[unit + 1]
        a = bias[unit]
        if stop - start < _SHORT:  # the processor overlaps neighbouring rows
            for j in range(start, stop):
                a += values[j] * x[columns[j]]
        else:
            b, c, d = np.float32(0), np.float32(0), np.float32(0)
            j = start
            for _ in range((stop - start) >> _2):
                a += values[j] * x[columns[j]]
                b += values[j + _1] * x[columns[j + _1]]
                c += values[j + _2] * x[columns[j + _2]]
                d += values[j + _3] * x[columns[j + _3]]
                j = np.uint32(j + _4)
            for i in range(j, stop):
                a += values[i] * x[columns[i]]
            a = (a + b) + (c + d)
        out[unit] = lowest if a < lowest else a
        start = stop


@_compile
def chain_of_many(x, starts, columns, values, bias, widths, relu, out):
    """Run a chain of sparse layers on a batch: x [batch, features] to out [batch, units].

    The batch is worked on in tiles.
    """
    layers, widest = len(relu), widths.max()
    tile = min(len(x), _TILE)
    one, two = np.empty((widest, tile), np.float32), np.empty((widest, tile), np.float32)
    for top in range(0, len(x), tile):
        high = min(tile, len(x) - top)
        _turn(x[top : top + high], one)
        row = 0
        for layer in range(layers):
            for unit in range(widths[layer + 1]):
                line = two[unit, :high]
                line[:] = bias[row]
                _add_rows(one, columns, values, starts[row], starts[row + 1], line)
                if relu[layer]:
                    _cut(line)
                row += 1
            one, two = two, one
        for i in range(high):
            for unit in range(widths[layers]):
                out[top + i, unit] = one[unit, i]


@_compile
def _turn(x, turned):
    """Transpose in strips of 16 inputs, whose lines stay in the cache."""
    for left in range(0, len(x), 16):
        right = min(len(x), left + 16)
        for feature in range(x.shape[1]):
            for i in range(left, right):
                turned[feature, i] = x[i, feature]


@_compile
def _cut(line):
    for i in range(len(line)):
        line[i] = np.float32(0) if line[i] < 0 else line[i]


@_compile
def _add_rows(x, columns, values, start, stop, line):
    j, n = start, len(line)
    for _ in range((stop - start) >> _2):
        v0, v1, v2, v3 = values[j], values[j + _1], values[j + _2], values[j + _3]
        x0, x1, x2, x3 = x[columns[j]], x[columns[j + _1]], x[columns[j + _2]], x[columns[j + _3]]
        for i in range(n):
            line[i] += (v0 * x0[i] + v1 * x1[i]) + (v2 * x2[i] + v3 * x3[i])
        j = np.uint32(j + _4)
    for k in range(j, stop):
        v, xk = values[k], x[columns[k]]
        for i in range(n):
            line[i] += v * xk[i]
