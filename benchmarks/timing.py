"""A stopwatch that takes the best of a few runs, so that a neighbour's work counts least."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_of(times: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `times` runs."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
