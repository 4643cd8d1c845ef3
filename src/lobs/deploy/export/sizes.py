"""What other ways of storing the same network would weigh."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from importlib import import_module

from safetensors.torch import save
from torch import Tensor


def dense_sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of the plain safetensors file with its zeros, and of that file through gzip and, where there is one, zstd."""
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
