"""Time code on shared machines: contenders take turns, and every number has an interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_ROUND = 2e-4  # seconds per sample, well above the resolution of the clock


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    middle: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        form = form or ".3g"
        return f"{self.middle:{form}} [{self.low:{form}}, {self.high:{form}}]"


Samples = dict[str, NDArray[np.float64]]


def take_turns(
    contenders: Mapping[str, Callable[[], Any]],
    seconds: float = 0.5,
    rounds: int = 21,
    before: Callable[[str], Any] | None = None,
) -> Samples:
    """Return samples of the seconds per call of each contender.

    Every round takes one sample of each, so other load on the machine hits all alike. The order
    changes from round to round.

    Args:
        contenders: functions to time, by name.
        seconds: time to spend in all, about; at least five rounds are run.
        rounds: largest number of rounds.
        before: called with the contender's name before each of its samples, which then are single
            calls. Its time does not count.
    """
    repeats = {name: _repeats(call) if before is None else 1 for name, call in contenders.items()}
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if before is not None:
                before(name)
            samples[name].append(_sample(contenders[name], repeats[name]))
        if turn >= 4 and time.perf_counter() - began > seconds:
            break
    return {name: np.array(values) for name, values in samples.items()}


def cache_bytes() -> int:
    """Return the size of the processor's last cache, 32 MB where it is unknown."""
    try:
        size = _CACHE.read_text().strip()
        return int(size.removesuffix("K")) * (1024 if size.endswith("K") else 1)
    except (OSError, ValueError):
        return 32 * 2**20


def median(samples: NDArray[np.float64]) -> Interval:
    """Return the median of samples with its bootstrap interval."""
    resampled = np.median(np.random.default_rng(0).choice(samples, (500, len(samples))), axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(np.median(samples)), float(low), float(high))


def speedup(slow: NDArray[np.float64], fast: NDArray[np.float64]) -> Interval:
    """Return how many times faster `fast` is, from the ratios within each round."""
    return median(slow / fast)


def _repeats(call: Callable[[], Any]) -> int:
    call()  # warm up: compile, allocate, fill caches
    once = min(_sample(call, 1) for _ in range(3))
    return max(1, round(_ROUND / max(once, 1e-7)))


def _sample(call: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
