"""Measure the file sizes of a network in common formats."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from importlib import import_module

from safetensors.torch import save
from torch import Tensor


def dense_sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return bytes of the plain safetensors file, and of that file after gzip and zstd.

    zstd is left out where Python has no module for it.
    """
    plain = save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    )
    sizes = {"dense": len(plain), "gzip -9": len(gzip.compress(plain, 9))}
    for module, call in (("compression.zstd", "compress"), ("zstandard", "compress")):
        try:
            sizes["zstd -19"] = len(getattr(import_module(module), call)(plain, 19))
            break
        except ImportError:
            continue
    return sizes
