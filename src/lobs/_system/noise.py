"""Give a network the same random numbers each time it runs on a batch.

Some networks draw noise in eval mode, too. Dense and pruned outputs can be compared only if both
drew the same. The random state of the caller is restored, so data loaders keep their own.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ENOUGH = 1024  # elements of a batch that decide its seed


@contextmanager
def same_noise(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the random generators of torch, numpy and Python; restore them afterwards.

    Args:
        seed: equal for runs that must draw the same numbers.
        device: where the network runs.
    """
    seed %= 2**32
    accelerators = [device] if device is not None and device.type == "cuda" else []
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=accelerators):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def seed_of(*parts: Any) -> int:
    """Return a seed that is equal for equal parts: tensors, strings, numbers, nested ones too."""
    found = 0
    for part in parts:
        if isinstance(part, Tensor):
            found = zlib.crc32(_bytes(part), found)
        elif isinstance(part, Mapping):
            found = seed_of(found, *part.values())
        elif isinstance(part, tuple | list):
            found = seed_of(found, *part)
        elif isinstance(part, str | int | float | bool):
            found = zlib.crc32(str(part).encode(), found)
    return found


def _bytes(x: Tensor) -> bytes:
    if x.is_meta or not x.numel() or x.layout != torch.strided:
        return b""
    with torch._C._DisableFuncTorch():  # forward derivatives would wrap the results
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        some = x.detach().flatten()[:_ENOUGH].cpu().contiguous()
        return some.view(torch.uint8).numpy().tobytes()
