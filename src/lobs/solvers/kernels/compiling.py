"""How CPU kernels are compiled and how their rows are shared among threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch
from numba.core import event

from lobs._system.progress import compiling


def compiled(function: Callable[..., Any]) -> Any:
    """Compile without the GIL and keep the result on disk; where nothing can be kept, compile anew in every process."""
    # Reordering sums is allowed, assuming away NaN and infinity is not.
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba's word for "no folder to write to"
        return numba.njit(**options)(function)


def spans(rows: int) -> list[tuple[int, int]]:
    """Pieces of work small enough to keep all of torch's threads busy until the end."""
    chunk = max(1, min(16, rows // (max(1, torch.get_num_threads()) * 4)))
    return [(low, min(rows, low + chunk)) for low in range(0, rows, chunk)]


class _Announcer(event.Listener):
    """Tell the progress display when numba compiles; kernels from its cache raise no event."""

    def on_start(self, event: Any) -> None:
        """Announce that compiling begins."""
        compiling(True)

    def on_end(self, event: Any) -> None:
        """Announce that compiling is done."""
        compiling(False)


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
