"""Time a function by its best of several runs, so that a neighbour's work counts least."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_of(times: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of `times` runs."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
