"""Budgets in time: the share is the best one, and the run says what it promised and measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import lobs
from lobs import Budget
from lobs._system.stopwatch import Interval
from lobs.errors import TargetError
from lobs.layers import find_layers
from lobs.pruning import latency
from lobs.pruning.latency import KEPT, Price, _next_share, _share


def test_a_price_is_interpolated_and_never_above_dense():
    price = Price(10.0, tuple(20 * k for k in KEPT))
    assert price.at(0.25) == pytest.approx(5.0) and price.at(0.6) == price.at(1.0) == 10.0


@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_as_good_as_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    options = {
        str(i): [(float(c), float(e), k) for k, (c, e) in enumerate(rng.random((4, 2)))]
        for i in range(4)
    }
    give = 2.0
    best = min(
        sum(o[1] for o in pick)
        for pick in itertools.product(*options.values())
        if sum(o[0] for o in pick) <= give * 0.998
    )
    counts = _share(options, give)
    picked = [options[name][gone] for name, gone in counts.items()]
    assert sum(o[0] for o in picked) <= give * 1.001
    assert sum(o[1] for o in picked) <= best + 1e-12


def test_trials_close_in_on_the_goal():
    def network(share):  # other than the sum of prices
        return 3 + 0.6 * share

    tried = []
    for _ in range(8):
        give = _next_share(tried, 6.0, 2.0)
        tried.append((give, network(give)))
    assert min(abs(seconds - 6.0) for _, seconds in tried) < 0.05


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speedup": 0.9}, "speedup is 0.9: it is a ratio of at least 1"),
        ({"latency": 0}, "latency is 0: give seconds"),
        ({"speedup": 2, "batch": 0}, "batch is 0"),
        ({"speedup": 2, "latency": 1e-3}, "exactly one of"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(TargetError, match=message):
        Budget(**fields)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock: the wide layer gains from zeros, the narrow one does not."""

    def prices(model, layers, example):
        gain = {layer.name: layer.columns > 30 for layer in layers}
        return {
            name: Price(4e-3, tuple((8e-3 if wide else 4e-2) * k for k in KEPT))
            for name, wide in gain.items()
        }

    def seconds(model):
        total = 1e-3
        for m in model:
            if isinstance(m, nn.Linear):
                kept = float((m.weight != 0).float().mean())
                total += min(4e-3, (8e-3 if m.in_features > 30 else 4e-2) * kept)
        return total

    class Measured:
        def __init__(self, model):
            now = seconds(model)
            self.dense = Interval(9e-3, 9e-3, 9e-3)
            self.accelerated = Interval(now, now, now)
            self.speedup = Interval(9e-3 / now, 1.0, 1.0)
            self.batch = 1

    monkeypatch.setattr(latency, "_prices", prices)
    monkeypatch.setattr(latency, "_accelerated", lambda model, example: Measured(model))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 30))


BATCHES = [torch.randn(50, 40) for _ in range(4)]


def test_a_budget_in_time_is_met_and_reported(clock):
    for target in (Budget(speedup=1.3), Budget(latency=9e-3 / 1.3)):
        result = lobs.prune(network(), BATCHES, target, refit="layers", progress=False)
        time = result.settings["time"]
        assert time["measured speedup"] == pytest.approx(1.3, rel=0.05)
        assert time["predicted seconds"] == pytest.approx(time["measured seconds"], rel=0.02)
        kept = {layer.name: layer.kept_fraction for layer in result.layers}
        assert kept["2"] == 1.0 and 0.1 < kept["0"] < 0.4  # zeros in the other would not pay
        assert "asked 6.92 ms" in result.summary() and result.preview is not None


def test_limits_by_layer_hold(clock):
    target = Budget(speedup=1.1, keep_at_most={"2": 0.5}, keep_at_least={"0": 0.3})
    result = lobs.prune(network(), BATCHES, target, refit="layers", progress=False)
    kept = {layer.name: layer.kept_fraction for layer in result.layers}
    assert kept["2"] <= 0.5 and kept["0"] >= 0.3


def test_a_goal_out_of_reach_is_refused_with_what_can_be_reached(clock):
    with pytest.raises(TargetError, match=r"asked to take 1 ms. Ask for speedup="):
        lobs.prune(network(), BATCHES, Budget(latency=1e-3), refit="layers", progress=False)
    with pytest.raises(TargetError, match="at most"):
        target = Budget(speedup=1.6, keep_at_least={"*": 0.4})
        lobs.prune(network(), BATCHES, target, refit="layers", progress=False)


def test_prices_come_from_the_engines_of_this_machine():
    model, x = network(), torch.randn(1, 40)
    layers = find_layers(model)
    prices = latency._prices(model, layers, x)
    assert set(prices) == {"0", "2"}
    for price in prices.values():
        assert price.dense > 0 and len(price.seconds) == len(KEPT)
        assert list(price.seconds) == sorted(price.seconds)


def test_layers_inside_attention_stay_as_they_are():
    """Their kernels are not ours to replace, so zeros there would not pay."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True, dropout=0).eval()
    assert set(latency._prices(layer, find_layers(layer), torch.randn(1, 5, 16))) == {
        "linear1",
        "linear2",
    }


def test_a_resumed_run_takes_the_plan_that_was_made(tmp_path, monkeypatch):
    """A clock never gives the same plan again."""
    plans = iter((0.9, 0.5))

    def planned(model, layers, curves, timing):
        share, timing.predicted = next(plans), timing.dense
        return {name: int(share * curve.prunable) for name, curve in curves.items()}

    monkeypatch.setattr("lobs.pruning.session.counts_in_time", planned)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    batches = [torch.randn(64, 32) for _ in range(2)]

    def run():
        execution = lobs.Execution(resume=tmp_path)
        target = Budget(speedup=1.2, rounds=1)
        return lobs.prune(model, batches, target, execution=execution, progress=False)

    assert run().kept == run().kept


def test_a_budget_in_time_without_layers_to_speed_up_is_refused():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 8))

        def forward(self, x):
            return nn.functional.linear(x, self.w)

    batches = [torch.randn(64, 8)]
    with pytest.raises(TargetError, match="none of the layers can be made faster"):
        lobs.prune(Functional(), batches, Budget(speedup=1.2), progress=False)


def test_a_lucky_measurement_does_not_decide(clock, monkeypatch):
    """A trial that comes near the goal is timed again, and both measurements count."""
    honest, calls = latency._trial, []

    def trial(model, layers, counts, timing):
        calls.append(counts)
        seconds = honest(model, layers, counts, timing)
        return timing.goal if len(calls) == 1 else 1.2 * seconds

    monkeypatch.setattr(latency, "_trial", trial)
    result = lobs.prune(network(), BATCHES, Budget(speedup=1.1), refit="layers", progress=False)
    assert calls[0] == calls[1] and calls[-2] == calls[-1]
    assert result.settings["time"]["predicted speedup"] == pytest.approx(1.1, rel=0.1)
    assert len({str(counts) for counts in calls}) > 1  # the first one did not stand
