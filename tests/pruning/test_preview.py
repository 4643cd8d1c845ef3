from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget, Sparsity
from lobs.pruning.preview import STOPS, Outlook

EXACT = lobs.Exact(backend="torch")


def network():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    return model, [torch.randn(300, 20) @ torch.randn(20, 20)]


def prune(target, **more):
    model, batches = network()
    return lobs.prune(model, batches, target, solver=EXACT, progress=False, **more)


@pytest.fixture(scope="module")
def once():
    return prune(0.6, passes=1, inputs="dense")


@pytest.mark.parametrize(
    "target", [Sparsity(0.6), Sparsity(0.7, keep_at_least={"4": 0.5}), Budget(parameters=200), Budget(bytes=1500)], ids=repr
)
def test_the_stop_that_was_run_holds_the_runs_own_counts(target):
    result = prune(target)
    outlook = result.outlook
    assert {layer.name: layer.total - layer.kept for layer in result.layers} == {
        name: row[outlook.at] for name, row in outlook.removed.items()
    }
    assert outlook.kept_fraction(outlook.at) == pytest.approx(result.kept_fraction)
    assert outlook.priced == (target == Budget(bytes=1500))


def test_every_stop_is_what_a_run_with_that_budget_does(once):
    outlook, total = once.outlook, once.total
    for stop in (5, len(outlook.change) // 2, len(outlook.change) - 3):
        gone = sum(row[stop] for row in outlook.removed.values())
        again = prune(Sparsity(gone / total), passes=1, inputs="dense")
        assert [x.total - x.kept for x in again.layers] == [row[stop] for row in outlook.removed.values()]
        assert again.outlook.change[again.outlook.at] == outlook.change[stop]


def test_on_dense_inputs_the_exact_solver_makes_the_predicted_errors_true(once):
    outlook = once.outlook
    for layer in once.layers:
        assert outlook.errors[layer.name][outlook.at] == pytest.approx(layer.relative_error, rel=1e-3)


def test_the_predicted_change_of_a_single_last_layer_is_the_measured_one():
    torch.manual_seed(0)
    result = lobs.prune(nn.Linear(12, 5), [torch.randn(200, 12)], 0.5, solver=EXACT, progress=False, inputs="dense")
    assert result.outlook.change[result.outlook.at] == pytest.approx(result.certificate.measured, rel=1e-3)


def test_stops_rise_and_errors_with_them(once):
    outlook = once.outlook
    assert 20 < len(outlook.change) <= STOPS + 1
    gone = [sum(row[i] for row in outlook.removed.values()) for i in range(len(outlook.change))]
    assert gone == sorted(set(gone)) and gone[0] == 0
    assert list(outlook.change) == sorted(outlook.change)


def test_limits_hold_at_every_stop():
    outlook = prune(Sparsity(0.7, keep_at_least={"4": 0.5}, keep_at_most={"0": 0.8})).outlook
    assert max(outlook.removed["4"]) <= 0.5 * outlook.totals["4"]
    assert min(outlook.removed["0"]) >= 0.2 * outlook.totals["0"]


@pytest.mark.parametrize("target", [Sparsity({"0": 0.5}), lobs.ErrorBudget(0.1, relative=True), lobs.NByM(2, 4)], ids=repr)
def test_without_a_shared_budget_there_is_no_outlook(target):
    assert prune(target).outlook is None


def test_a_largest_drop_leaves_the_outlook_of_the_network_that_was_chosen():
    model, batches = network()
    out = model(batches[0]).detach()

    def score(net):
        return -float((net(batches[0]).detach() - out).norm() / out.norm())

    result = lobs.prune(model, batches, Budget(max_drop=0.2), evaluate=score, solver=EXACT, progress=False, inputs="dense")
    outlook = result.outlook
    assert [x.total - x.kept for x in result.layers] == [row[outlook.at] for row in outlook.removed.values()]


def test_an_outlook_survives_json_and_a_damaged_one_is_refused(once):
    record = asdict(once.outlook)
    assert Outlook.from_record(record) == once.outlook
    with pytest.raises(ValueError, match="does not fit"):
        Outlook.from_record({**record, "at": 10_000})
    with pytest.raises(ValueError, match="different layers"):
        Outlook.from_record({**record, "errors": {}})
