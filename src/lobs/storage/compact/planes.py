"""Split values into byte planes and compress the top bytes.

The top bytes of trained weights hold the sign and most of the exponent. They take few values and
compress well. The other bytes are almost random and are stored unchanged. Nothing is rounded.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

_STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY)


def split(values: Tensor) -> dict[str, Tensor]:
    """Return the top byte of every value, deflated, and the other bytes."""
    planes = values.contiguous().view(torch.uint8).reshape(len(values), -1).numpy()
    top = min((_deflate(planes[:, -1].tobytes(), strategy) for strategy in _STRATEGIES), key=len)
    rest = np.ascontiguousarray(planes[:, :-1]).reshape(-1)
    return {
        "top": torch.from_numpy(np.frombuffer(top, np.uint8).copy()),
        "rest": torch.from_numpy(rest),
    }


def join(parts: dict[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """Join what `split` made; raise `ValueError` unless exactly `count` values come out.

    Args:
        parts: the planes "top" and "rest".
        count: the number of values announced.
        dtype: the dtype of the values.
    """
    inflater = zlib.decompressobj()
    try:
        top = inflater.decompress(parts["top"].numpy().tobytes(), count + 1)
    except zlib.error as error:
        raise ValueError(f"the top bytes do not inflate: {error}") from error
    if len(top) != count or not inflater.eof or inflater.unused_data:
        raise ValueError(f"{len(top)} top bytes for {count} values")
    planes = np.empty((count, dtype.itemsize), np.uint8)
    planes[:, :-1] = parts["rest"].numpy().reshape(count, dtype.itemsize - 1)
    planes[:, -1] = np.frombuffer(top, np.uint8)
    return torch.from_numpy(planes.reshape(-1)).view(dtype)


def _deflate(data: bytes, strategy: int) -> bytes:
    press = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
    return press.compress(data) + press.flush()
