from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.pruning.sweep import SweepPoint, inflection, sweep, sweep_by_layer


def points(errors):
    """A curve of test errors; its scores are their negatives, larger is better."""
    n = len(errors)
    return [SweepPoint(1 - i / n, 1 - i / n, 0.0, -e) for i, e in enumerate(errors)]


def test_inflection_is_where_a_flat_curve_breaks():
    found = points([2, 2, 2.1, 2, 2.2, 2.3, 20, 60, 88])
    assert inflection(found) is found[5]


def test_inflection_ignores_noise_after_the_worst_point():
    found = points([2, 2, 2, 2, 90, 89, 88, 90, 80])
    assert inflection(found) is found[3]


@pytest.mark.parametrize("scores", [[1, 2, 3], [5, 5, 5, 5], [5, 4, 3, 2]])
def test_no_inflection_without_a_fall(scores):
    assert inflection(points(scores)) is None


def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, [torch.randn(100, 10)]


def evaluate(net):
    return float(net[0].weight.detach().abs().sum())


@pytest.mark.parametrize("by", ["keep", "epsilon"])
def test_each_point_of_sweep_is_what_prune_gives_by_default(by):
    model, x = case()
    found = sweep(model, x, evaluate, [0.7, 0.4, 0.2], by=by, progress=False)
    for point in found:
        kept = {"keep": point.asked}
        wanted = kept if by == "keep" else {"target": lobs.ErrorBudget(point.asked, relative=True)}
        expected = lobs.prune(model, x, **wanted, progress=False)
        assert point.score == evaluate(expected.model)
        assert point.kept_fraction == expected.kept_fraction
        errors = [layer.relative_error for layer in expected.layers]
        assert point.relative_error == pytest.approx(sum(errors) / len(errors))


@pytest.mark.parametrize("solver", ["greedy", "magnitude", "lobs"])
def test_each_point_by_layer_is_what_prune_gives_on_dense_inputs(solver):
    model, x = case()
    found = sweep_by_layer(model, x, evaluate, [0.7, 0.2], solver=solver, progress=False)
    for point in found:
        target = lobs.Sparsity(1 - point.asked, scope="layer")
        expected = lobs.prune(model, x, target, solver=solver, inputs="dense", progress=False)
        assert point.score == pytest.approx(evaluate(expected.model))
        assert point.kept_fraction == pytest.approx(expected.kept / expected.total)


def test_by_epsilon_the_error_stays_within():
    model = nn.Linear(10, 8)
    found = sweep(
        model, [torch.randn(100, 10)], lambda net: 0.0, [0.05, 0.2], by="epsilon", progress=False
    )
    assert (
        all(p.relative_error <= p.asked for p in found)
        and found[1].kept_fraction < found[0].kept_fraction
    )


def test_unknown_axis_is_refused():
    with pytest.raises(lobs.LobsError, match="use 'keep' or 'epsilon'"):
        sweep(
            nn.Linear(2, 2), [torch.ones(1, 2)], lambda net: 0.0, [0.5], by="time", progress=False
        )
