"""Stopwatches for machines that others use too: contenders run in turn, and every number comes with its interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUND = 2e-4  # seconds that one sample should last, well above the clock's step


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
    contenders: Mapping[str, Callable[[], Any]], seconds: float = 0.5, rounds: int = 21
) -> Samples:
    """Seconds a call of each contender, one sample of each per round, so that a neighbour's work falls on all alike.

    The order changes from round to round. `seconds` is the time to spend on all, about; there are
    at least five rounds.
    """
    repeats = {name: _repeats(call) for name, call in contenders.items()}
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_sample(contenders[name], repeats[name]))
        if turn >= 4 and time.perf_counter() - began > seconds:
            break
    return {name: np.array(values) for name, values in samples.items()}


def median(samples: NDArray[np.float64]) -> Interval:
    """The median of samples and how well it is known."""
    resampled = np.median(np.random.default_rng(0).choice(samples, (500, len(samples))), axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(np.median(samples)), float(low), float(high))


def speedup(slow: NDArray[np.float64], fast: NDArray[np.float64]) -> Interval:
    """How many times faster, from the ratios within each round."""
    return median(slow / fast)


def _repeats(call: Callable[[], Any]) -> int:
    call()  # compiled, allocated, cached
    once = min(_sample(call, 1) for _ in range(3))
    return max(1, round(_ROUND / max(once, 1e-7)))


def _sample(call: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
