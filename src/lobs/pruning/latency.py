"""Budgets in time: what layers take at each kept fraction here, shared by error curves.

A layer's price is no number per weight. Below some kept fraction a sparse kernel wins, and above it
the layer takes its dense time. So prices are measured at several fractions, with the engine that
would run the layer. One dynamic programme then shares the time: each layer gets the kept fraction
whose errors add up to the least, and layers where sparsity does not pay stay dense.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lobs._system.progress import track
from lobs.errors import TargetError
from lobs.pruning.plan import Curve
from lobs.targets import Budget

if TYPE_CHECKING:
    from lobs.deploy.accelerate import Acceleration, LayerTiming
    from lobs.layers import Layer

KEPT = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)  # fractions at which prices are measured
_STEPS = np.unique(np.r_[np.geomspace(KEPT[0], 0.2, 12), np.linspace(0.2, KEPT[-1], 21)])
_BINS = 4000  # of the time that is shared
_LAYER_SECONDS = 0.05  # of measuring, for each layer and fraction
_TRIALS = 8  # networks with random zeros that are timed, to correct the sum of prices
_NEAR = 0.03  # a trial as near to the goal as this is good enough


@dataclass(frozen=True)
class Price:
    """What one layer takes.

    Args:
        dense: seconds of the dense layer.
        seconds: seconds at each fraction of `KEPT`, with the best engine.
    """

    dense: float
    seconds: tuple[float, ...]

    def at(self, kept: float) -> float:
        """Return the seconds at a kept fraction, interpolated; never more than dense."""
        return min(self.dense, float(np.interp(kept, KEPT, self.seconds)))


@dataclass
class Timing:
    """What is known about the time of one network on this machine.

    Args:
        example: the batch that is timed.
        prices: the price of each layer that may be replaced.
        dense: seconds of the whole dense network.
        goal: seconds to reach.
        predicted: seconds of a network with as many zeros in random places.
    """

    example: Any
    prices: dict[str, Price]
    dense: float
    goal: float
    predicted: float = 0.0

    def measured(self, model: nn.Module) -> dict[str, Any]:
        """Return prediction and measurement of a pruned network, ready for JSON."""
        found = _accelerated(model, self.example)
        return {
            "dense seconds": found.dense.middle,
            "goal seconds": self.goal,
            "predicted seconds": self.predicted,
            "measured seconds": found.accelerated.middle,
            "measured speedup": found.speedup.middle,
            "predicted speedup": self.dense / self.predicted,
            "batch": found.batch,
            "threads": torch.get_num_threads(),
            "prices": {name: asdict(price) for name, price in self.prices.items()},
        }


def start_timing(
    model: nn.Module, layers: Sequence[Layer], batches: Iterable[Any], target: Budget
) -> Timing:
    """Time the network and its layers.

    Args:
        model: the dense network.
        layers: the layers that may lose weights.
        batches: the data; the first samples of the first batch are timed.
        target: a budget with `latency` or `speedup`.
    """
    example = _first(next(iter(batches)), target.batch)
    whole = _accelerated(model, example)
    goal = target.latency if target.latency is not None else whole.dense.middle / _speedup(target)
    return Timing(example, _prices(model, layers, example), whole.dense.middle, goal)


def counts_in_time(
    model: nn.Module,
    layers: Mapping[str, Layer],
    curves: Mapping[str, Curve],
    timing: Timing,
) -> dict[str, int]:
    """Return how many weights each layer loses.

    The sum of prices is not the time of the network: caches and the code between layers matter. So
    networks with as many zeros in random places are timed, and the time to share is corrected.

    Args:
        model: the dense network.
        layers: its layers, by name.
        curves: error curves of the layers.
        timing: the prices; its prediction is written.
    """
    if not timing.prices:
        raise TargetError(
            "a budget in time: none of the layers can be made faster here. Use keep=… instead."
        )
    options = _options(curves, layers, timing.prices)
    floor = sum(min(cost for cost, _, _ in rows) for rows in options.values())
    floor *= 1 + len(options) / _BINS
    rest = timing.dense - sum(price.dense for price in timing.prices.values())
    tried: list[tuple[float, float]] = []  # time that was shared, and seconds of the network
    best: tuple[float, dict[str, int]] | None = None
    with track("trial networks", _TRIALS) as advance:
        while len(tried) < _TRIALS:
            give = max(floor, _next_share(tried, timing.goal, timing.goal - rest))
            if give in (shared for shared, _ in tried):
                break
            counts = _share(options, give)
            seconds = _trial(model, layers, counts, timing)
            if abs(seconds / timing.goal - 1) <= _NEAR:  # luck must not decide
                seconds = math.sqrt(seconds * _trial(model, layers, counts, timing))
            tried.append((give, seconds))
            off = seconds / timing.goal - 1
            if best is None or abs(off) < abs(best[0]):
                best, timing.predicted = (off, counts), seconds
            advance(1)
            if abs(off) <= _NEAR:
                break
    assert best is not None
    if best[0] > 0.1:
        raise TargetError(
            f"the network takes {1e3 * timing.dense:.3g} ms dense, {1e3 * timing.predicted:.3g} ms "
            "with as few weights as the limits allow, and is asked to take "
            f"{1e3 * timing.goal:.3g} ms. "
            f"Ask for speedup={timing.dense / timing.predicted:.2g} at most."
        )
    return best[1]


def _next_share(tried: Sequence[tuple[float, float]], goal: float, first: float) -> float:
    """Return how much time to share next, so that the network's comes to the goal.

    Args:
        tried: times that were shared, and the seconds of the network they led to.
        goal: seconds to reach.
        first: what to share where nothing was tried.
    """
    if not tried:
        return first
    below = max((t for t in tried if t[1] <= goal), default=None)
    above = min((t for t in tried if t[1] > goal), default=None)
    if below is None or above is None or below[0] >= above[0]:
        give, seconds = min(tried, key=lambda t: abs(t[1] - goal))
        return give + (goal - seconds) * (1 + 0.5 * (len(tried) - 1))
    part = (goal - below[1]) / (above[1] - below[1])
    return below[0] + min(0.8, max(0.2, part)) * (above[0] - below[0])


def _options(
    curves: Mapping[str, Curve], layers: Mapping[str, Layer], prices: Mapping[str, Price]
) -> dict[str, list[tuple[float, float, int]]]:
    """Return for each layer what it may become: seconds, error, and number of weights removed."""
    found = {}
    for name, curve in curves.items():
        price = prices.get(name)
        most = curve.prunable if curve.most is None else curve.most
        keys = curve.keys.to(torch.float64).sort().values.clamp_min(0)
        errors = torch.cat([keys.new_zeros(1), keys.cumsum(0)]).numpy() * curve.multiplicity
        total, rows = layers[name].weight.numel(), []
        wanted = [round((1 - kept) * total) for kept in (1.0, *_STEPS)] if price else []
        for gone in {curve.fewest, *(n for n in wanted if curve.fewest <= n <= most)}:
            place = min(len(errors) - 1, round(gone / curve.multiplicity))
            cost = 0.0 if price is None else price.at(1 - gone / total)
            rows.append((cost, float(errors[place]), gone))
        found[name] = rows
    return found


def _share(options: Mapping[str, list[tuple[float, float, int]]], give: float) -> dict[str, int]:
    """Return the choice of least error whose seconds add up to `give` at most."""
    unit = give / _BINS
    least = np.full(_BINS + 1, np.inf)
    least[0] = 0.0
    chosen = []
    for rows in options.values():
        after, pick = np.full(_BINS + 1, np.inf), np.zeros(_BINS + 1, np.int64)
        for index, (cost, error, _) in enumerate(rows):
            bins = round(cost / unit)
            if bins > _BINS:
                continue
            sums = least[: _BINS + 1 - bins] + error
            better = sums < after[bins:]
            after[bins:][better], pick[bins:][better] = sums[better], index
        chosen.append(pick)
        least = after
    at, counts = int(least.argmin()), {}
    for (name, rows), pick in zip(reversed([*options.items()]), reversed(chosen), strict=True):
        cost, _, gone = rows[pick[at]]
        counts[name], at = gone, at - round(cost / unit)
    return counts


def _prices(model: nn.Module, layers: Sequence[Layer], example: Any) -> dict[str, Price]:
    """Measure every layer at every fraction, with zeros in random places."""
    from lobs.deploy.accelerate.acceleration import inputs_of, is_cold, kind_of
    from lobs.deploy.accelerate.layerwise import Measuring, measure_layer

    prices: dict[str, Price] = {}
    with torch.no_grad():
        twin = copy.deepcopy(model).eval().requires_grad_(False)
        inputs, _ = inputs_of(twin, example)
        measuring = Measuring(0.0, _LAYER_SECONDS, cold=is_cold(twin, inputs))
        known: dict[Any, Price] = {}
        with track("measure prices", len(layers)) as advance:
            for layer in layers:
                advance(1)
                if layer.name not in inputs:
                    continue
                module, x = twin.get_submodule(layer.name), inputs[layer.name]
                kind = kind_of(module, x)
                if kind not in known:
                    rows = [
                        measure_layer("", _thinned(module, kept), x, measuring)[0] for kept in KEPT
                    ]
                    dense = float(np.median([row.seconds["dense"] for row in rows]))
                    # A layer's ratio to dense is measured better than its time.
                    fast = [dense * _best_ratio(row) for row in rows]
                    known[kind] = Price(dense, tuple(np.maximum.accumulate(fast).tolist()))
                prices[layer.name] = known[kind]
    return prices


def _best_ratio(row: LayerTiming) -> float:
    """Return the time of the best sparse engine over the dense one's; 1 where there is none."""
    sparse = [seconds for kind, seconds in row.seconds.items() if kind != "dense"]
    return min(sparse, default=row.seconds["dense"]) / row.seconds["dense"]


def _trial(
    model: nn.Module, layers: Mapping[str, Layer], counts: Mapping[str, int], timing: Timing
) -> float:
    """Return the seconds of a network with as many zeros in random places."""
    twin = copy.deepcopy(model)
    for name, gone in counts.items():
        if gone and name in timing.prices:
            module = twin.get_submodule(name)
            twin_layer = _thinned(module, 1 - gone / layers[name].weight.numel())
            module.load_state_dict(twin_layer.state_dict())
    # The ratio is measured better than the time, which other work on the machine shifts.
    return timing.dense / _accelerated(twin, timing.example).speedup.middle


def _thinned(layer: nn.Module, kept: float) -> nn.Module:
    """Return a copy of a layer with zeros in random places."""
    twin = copy.deepcopy(layer)
    weight = twin.weight
    assert isinstance(weight, Tensor)
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight.masked_fill_(weight == 0, 1e-6)  # its own zeros must not add to the others
        gone = torch.zeros(weight.numel(), dtype=torch.bool)
        gone[noise.flatten().argsort()[round(kept * weight.numel()) :]] = True
        weight.masked_fill_(gone.view(weight.shape), 0)
    return twin


def _accelerated(model: nn.Module, example: Any) -> Acceleration:
    from lobs.deploy.accelerate import accelerate

    return accelerate(model, example, seconds=4 * _LAYER_SECONDS, progress=False)


def _first(batch: Any, samples: int) -> Any:
    """Return the first samples of a batch."""
    if isinstance(batch, Mapping):
        return {k: v[:samples] if isinstance(v, Tensor) else v for k, v in batch.items()}
    return (batch[0] if isinstance(batch, tuple | list) else batch)[:samples]


def _speedup(target: Budget) -> float:
    assert target.speedup is not None
    return target.speedup
