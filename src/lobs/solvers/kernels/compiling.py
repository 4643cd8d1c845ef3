"""Compile CPU kernels, divide rows among threads, and gather what a row needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch
from numba.core import event

from lobs._system.progress import compiling

# Sums may be reordered. NaN and infinity must be handled.
_KERNEL: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "no_cfunc_wrapper": True,
}
_HELPER: dict[str, Any] = {**_KERNEL, "no_cpython_wrapper": True}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls. It releases the GIL, and its machine code is cached.

    Where no folder is writable, or the cache is damaged, every process compiles it again.
    """
    try:
        made = numba.njit(**_KERNEL, cache=True)(function)
    except RuntimeError:  # numba raises it where no cache folder is writable
        return numba.njit(**_KERNEL)(function)
    cache = getattr(made, "_cache", None)
    for name in ("load_overload", "save_overload"):
        if hasattr(cache, name):
            setattr(cache, name, _forgiving(getattr(cache, name)))
    return made


def _forgiving(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of numba's cache that gives None where the files cannot be read or written."""

    def attempt(*args: Any) -> Any:
        try:
            return step(*args)
        except Exception:  # unpickling garbage may raise anything
            return None

    return attempt


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels of the same file call.

    Its machine code is stored in theirs. Without an entry for Python and a cache file, it compiles
    in half the time.
    """
    return numba.njit(**_HELPER)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function with one caller as part of that caller, so that it is optimised once."""
    return numba.njit(**_HELPER, inline="always")(function)


def spans(rows: int) -> list[tuple[int, int]]:
    """Divide rows into pieces that keep all of torch's threads busy until the end."""
    chunk = max(1, min(16, rows // (max(1, torch.get_num_threads()) * 4)))
    return [(low, min(rows, low + chunk)) for low in range(0, rows, chunk)]


@compiled
def gather(gram: Any, lines: Any, columns: Any, out: Any) -> None:
    """Set out[r, i, j] = gram[lines[r, i], columns[r, j]].

    That is four times faster than indexing with two tensors.
    """
    for r in range(lines.shape[0]):
        wanted = columns[r]
        for i in range(lines.shape[1]):
            source, target = gram[lines[r, i]], out[r, i]
            for j in range(wanted.shape[0]):
                target[j] = source[wanted[j]]


class _Announcer(event.Listener):
    """Notify the progress display when numba compiles; kernels from its cache raise no event."""

    def on_start(self, event: Any) -> None:
        """Announce that compiling begins."""
        compiling(True)

    def on_end(self, event: Any) -> None:
        """Announce that compiling is done."""
        compiling(False)


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
