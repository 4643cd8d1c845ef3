"""How CPU kernels are compiled and how their rows are shared among threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch


# Reordering sums is allowed, assuming away NaN and infinity is not.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls; it holds no GIL, and its machine code is cached on disk.

    Where no folder is writable, it is compiled again in every process.
    """
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba's word for "no folder to write to"
        return numba.njit(**_OPTIONS)(function)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels of the same file call.

    It becomes part of their machine code. It has no Python entry and no cache file of its own,
    which halves the time that compiling it takes.
    """
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


def spans(rows: int) -> list[tuple[int, int]]:
    """Pieces of work small enough to keep all of torch's threads busy until the end."""
    chunk = max(1, min(16, rows // (max(1, torch.get_num_threads()) * 4)))
    return [(low, min(rows, low + chunk)) for low in range(0, rows, chunk)]
