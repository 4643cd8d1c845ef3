from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget, Sparsity
from lobs.pruning.preview import STOPS, BudgetPreview

EXACT = lobs.GreedyOBS(backend="torch")


def network():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    return model, [torch.randn(300, 20) @ torch.randn(20, 20)]


def prune(target, **more):
    model, batches = network()
    return lobs.prune(model, batches, target, solver=EXACT, progress=False, **more)


@pytest.fixture(scope="module")
def once():
    return prune(Sparsity(0.6, rounds=1), inputs="dense")


@pytest.mark.parametrize(
    "target",
    [
        Sparsity(0.6),
        Sparsity(0.7, keep_at_least={"4": 0.5}),
        Budget(parameters=200),
        Budget(bytes=1500),
    ],
    ids=repr,
)
def test_the_stop_that_was_run_holds_the_runs_own_counts(target):
    result = prune(target)
    preview = result.preview
    assert {layer.name: layer.total - layer.kept for layer in result.layers} == {
        name: row[preview.at] for name, row in preview.removed.items()
    }
    assert preview.kept_fraction(preview.at) == pytest.approx(result.kept_fraction)
    assert preview.priced == (target == Budget(bytes=1500))


def test_every_stop_is_what_a_run_with_that_budget_does(once):
    preview, total = once.preview, once.total
    for stop in (5, len(preview.change) // 2, len(preview.change) - 3):
        gone = sum(row[stop] for row in preview.removed.values())
        again = prune(Sparsity(gone / total, rounds=1), inputs="dense")
        assert [x.total - x.kept for x in again.layers] == [
            row[stop] for row in preview.removed.values()
        ]
        assert again.preview.change[again.preview.at] == preview.change[stop]


def test_every_stop_is_what_a_run_does_where_a_layer_matters_little():
    def small_steps(target):
        model, batches = network()
        with torch.no_grad():
            model[0].weight *= 1e-4
            model[0].bias += 1
        return lobs.prune(model, batches, target, solver=EXACT, inputs="dense", progress=False)

    preview = small_steps(Sparsity(0.6, rounds=1)).preview
    for stop in (5, len(preview.change) // 2, len(preview.change) - 3):
        gone = [row[stop] for row in preview.removed.values()]
        again = small_steps(Sparsity(sum(gone) / sum(preview.totals.values()), rounds=1))
        assert [x.total - x.kept for x in again.layers] == gone
        assert gone[0] < preview.totals["0"]


def test_on_dense_inputs_the_exact_solver_makes_the_predicted_errors_true(once):
    preview = once.preview
    for layer in once.layers:
        assert preview.errors[layer.name][preview.at] == pytest.approx(
            layer.relative_error, rel=1e-3
        )


def test_the_predicted_change_of_a_single_last_layer_is_the_measured_one():
    torch.manual_seed(0)
    result = lobs.prune(
        nn.Linear(12, 5),
        [torch.randn(200, 12)],
        lobs.Sparsity(0.5),
        solver=EXACT,
        progress=False,
        inputs="dense",
    )
    assert result.preview.change[result.preview.at] == pytest.approx(
        result.certificate.measured, rel=1e-3
    )


def test_stops_rise_and_errors_with_them(once):
    preview = once.preview
    assert 20 < len(preview.change) <= STOPS + 1
    gone = [sum(row[i] for row in preview.removed.values()) for i in range(len(preview.change))]
    assert gone == sorted(set(gone)) and gone[0] == 0
    assert list(preview.change) == sorted(preview.change)


def test_limits_hold_at_every_stop():
    preview = prune(Sparsity(0.7, keep_at_least={"4": 0.5}, keep_at_most={"0": 0.8})).preview
    assert max(preview.removed["4"]) <= 0.5 * preview.totals["4"]
    assert min(preview.removed["0"]) >= 0.2 * preview.totals["0"]


@pytest.mark.parametrize(
    "target",
    [Sparsity({"0": 0.5}), lobs.ErrorBudget(0.1, relative=True), lobs.NByM(2, 4)],
    ids=repr,
)
def test_without_a_shared_budget_there_is_no_outlook(target):
    assert prune(target).preview is None


def test_a_largest_drop_leaves_the_preview_of_the_network_that_was_chosen():
    model, batches = network()
    out = model(batches[0]).detach()

    def score(net):
        return -float((net(batches[0]).detach() - out).norm() / out.norm())

    result = lobs.prune(
        model,
        batches,
        Budget(drop=0.2, evaluate=score),
        solver=EXACT,
        progress=False,
        inputs="dense",
    )
    preview = result.preview
    assert [x.total - x.kept for x in result.layers] == [
        row[preview.at] for row in preview.removed.values()
    ]


def test_an_outlook_survives_json_and_a_damaged_one_is_refused(once):
    record = asdict(once.preview)
    assert BudgetPreview.from_record(record) == once.preview
    with pytest.raises(ValueError, match="does not fit"):
        BudgetPreview.from_record({**record, "at": 10_000})
    with pytest.raises(ValueError, match="different layers"):
        BudgetPreview.from_record({**record, "errors": {}})
