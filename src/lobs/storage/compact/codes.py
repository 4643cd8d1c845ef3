"""Encode the positions of stored values: one bit per position, or Rice-coded gaps.

A Rice code writes a gap g as its `width` low bits and g >> width in unary. Random masks have
geometric gaps, for which the code is within a few per cent of the entropy. Low bits and unary parts
are separate streams, so encoding and decoding are whole-array operations. Every reader checks its
input before it allocates more than a few times the bytes given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

WIDEST = 40


def pack_bits(positions: Positions, size: int) -> Bytes:
    """Encode positions as one bit for each of `size` places."""
    there = np.zeros(size, np.bool_)
    there[positions] = True
    return np.packbits(there)


def unpack_bits(data: Bytes, size: int) -> Positions:
    """Decode `pack_bits`; raise `ValueError` where the length or the padding is wrong."""
    if len(data) != -(-size // 8):
        raise ValueError(f"{len(data)} bytes of bits for {size} places")
    positions = np.flatnonzero(np.unpackbits(data))
    if len(positions) and positions[-1] >= size:
        raise ValueError("bits are set beyond the last place")
    return positions


def gap_width(positions: Positions) -> tuple[int, int]:
    """Return the cheapest number of low bits, and the bytes that the gaps then take."""
    gaps = _gaps(positions)
    n = len(gaps)
    unary = [n + int((gaps >> k).sum()) for k in range(WIDEST + 1)]
    costs = [-(-n * k // 8) + -(-u // 8) for k, u in enumerate(unary)]
    best = int(np.argmin(costs))
    return best, costs[best]


def pack_gaps(positions: Positions, width: int) -> Bytes:
    """Encode increasing positions as Rice-coded gaps.

    All low bits come first, then all unary parts, each padded to whole bytes.
    """
    gaps = _gaps(positions)
    low = (gaps[:, None] >> np.arange(width)) & 1
    ends = np.cumsum((gaps >> width) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 1
    return np.concatenate([np.packbits(low.astype(np.uint8)), np.packbits(unary)])


def unpack_gaps(data: Bytes, count: int, width: int, size: int) -> Positions:
    """Decode `pack_gaps`; raise `ValueError` unless `count` positions below `size` come out.

    Args:
        data: the encoded bytes.
        count: the number of positions announced.
        width: low bits of each gap.
        size: the number of places; every position is below it.
    """
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
    # In floating point, because a hostile integer sum could wrap around.
    if gaps.sum(dtype=np.float64) > size:
        raise ValueError("the gaps lead beyond the last place")
    positions: Positions = np.cumsum(gaps + 1) - 1
    if count and positions[-1] >= size:
        raise ValueError("the gaps lead beyond the last place")
    return positions


def _gaps(positions: Positions) -> Positions:
    gaps: Positions = np.diff(positions, prepend=-1) - 1
    return gaps
