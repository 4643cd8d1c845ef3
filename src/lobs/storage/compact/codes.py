"""Where the stored values lie: a bit per position, or the gaps between them in a Rice code.

A Rice code writes a gap g as its `width` low bits and g >> width in unary. With weights removed at
random gaps are geometric, for which it is within a few per cent of the entropy. Low bits and unary
parts go to separate streams, so that both directions are whole-array operations. Every reader
checks before it allocates more than a few times the bytes it was given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

WIDEST = 40


def pack_bits(positions: Positions, size: int) -> Bytes:
    """One bit for each of `size` places."""
    there = np.zeros(size, np.bool_)
    there[positions] = True
    return np.packbits(there)


def unpack_bits(data: Bytes, size: int) -> Positions:
    """Positions of the bits that are set; `ValueError` where the length or the padding is wrong."""
    if len(data) != -(-size // 8):
        raise ValueError(f"{len(data)} bytes of bits for {size} places")
    positions = np.flatnonzero(np.unpackbits(data))
    if len(positions) and positions[-1] >= size:
        raise ValueError("bits are set beyond the last place")
    return positions


def gap_width(positions: Positions) -> tuple[int, int]:
    """The cheapest width of low bits, and the bytes that the gaps then take."""
    gaps = _gaps(positions)
    n = len(gaps)
    unary = [n + int((gaps >> k).sum()) for k in range(WIDEST + 1)]
    costs = [-(-n * k // 8) + -(-u // 8) for k, u in enumerate(unary)]
    best = int(np.argmin(costs))
    return best, costs[best]


def pack_gaps(positions: Positions, width: int) -> Bytes:
    """Increasing positions as Rice-coded gaps: all low bits, then all unary parts, each padded to whole bytes."""
    gaps = _gaps(positions)
    low = (gaps[:, None] >> np.arange(width)) & 1
    ends = np.cumsum((gaps >> width) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 1
    return np.concatenate([np.packbits(low.astype(np.uint8)), np.packbits(unary)])


def unpack_gaps(data: Bytes, count: int, width: int, size: int) -> Positions:
    """The positions again; `ValueError` unless they are exactly `count`, increasing and below `size`."""
    split = -(-count * width // 8)
    if not 0 <= width <= WIDEST or len(data) < split:
        raise ValueError(f"{len(data)} bytes cannot hold {count} gaps with {width} low bits")
    ends = np.flatnonzero(np.unpackbits(data[split:]))
    if len(ends) != count or (len(data) - split) != (-(-(int(ends[-1]) + 1) // 8) if count else 0):
        raise ValueError(f"{len(ends)} gaps where {count} are announced")
    bits = np.unpackbits(data[:split], count=count * width).reshape(count, width)
    high = np.diff(ends, prepend=-1) - 1
    if count and int(high.max()) > size >> width:
        raise ValueError("a gap leads beyond the last place")
    gaps = (high << width) + bits @ (np.int64(1) << np.arange(width))
    if (
        gaps.sum(dtype=np.float64) > size
    ):  # in floating point, where a hostile sum cannot wrap around
        raise ValueError("the gaps lead beyond the last place")
    positions: Positions = np.cumsum(gaps + 1) - 1
    if count and positions[-1] >= size:
        raise ValueError("the gaps lead beyond the last place")
    return positions


def _gaps(positions: Positions) -> Positions:
    gaps: Positions = np.diff(positions, prepend=-1) - 1
    return gaps
