from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from lobs import ErrorBudget, Problem, Sparsity, solve
from lobs.errors import NumericalWarning, ProblemError, warning_once
from lobs.solvers import linalg, metric
from tests.conftest import make_moment


def true_inverse(found):
    return found.inverse / found.scale / found.scale.unsqueeze(1)


def test_metric_inverts_the_damped_moment():
    psi = make_moment(12)
    for damping in (0.0, 0.3):
        expected = torch.linalg.inv(psi + damping * torch.eye(12, dtype=torch.float64))
        torch.testing.assert_close(true_inverse(metric.metric(psi, damping)), expected)


def test_woodbury_recursion_ends_at_the_damped_inverse():
    samples = torch.randn(50, 8, dtype=torch.float64)
    psi = samples.T @ samples / 50
    for alpha in (1e4, 1e8):
        expected = true_inverse(metric.metric(psi, 1 / alpha))
        torch.testing.assert_close(
            linalg.woodbury_inverse(samples, alpha), expected, rtol=1e-6, atol=1e-8
        )


def test_well_determined_moment_is_not_damped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.metric(make_moment(20)).damping == 0


def test_singular_moment_is_damped_and_announced():
    samples = torch.randn(5, 12, dtype=torch.float64)
    with pytest.warns(
        NumericalWarning,
        match=r"layer 'fc': its input moment Ψ is singular \(rank 5 of 12; 5 samples\)",
    ):
        found = metric.metric(samples.T @ samples / 5, name="layer 'fc'", samples=5)
    assert found.damping == pytest.approx(
        metric.few_samples(12, 5) * float((samples.T @ samples / 5).diagonal().mean())
    )
    with pytest.warns(NumericalWarning, match=r"rank 5 of 12"):
        assert 0 < metric.metric(samples.T @ samples / 5).damping < 1e-4


def test_few_samples_are_damped_the_more_the_fewer_and_enough_not_at_all():
    shares = [metric.few_samples(100, n) for n in (1, 10, 50, 100, 500, 999)]
    assert shares == sorted(shares, reverse=True) and shares[0] <= 0.3 and shares[-1] > 0
    assert metric.few_samples(100, 1000) == metric.few_samples(100, None) == 0
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # it is no misfortune to have two samples a column: reported, not announced
        psi = make_moment(20)
        assert metric.metric(psi, samples=40).damping == pytest.approx(
            0.015 * float(psi.diagonal().mean())
        )


def test_a_bias_does_not_decide_how_much_quiet_inputs_are_damped():
    """In other units of the inputs the same weights go, and the error does not change."""
    inputs, weight = (
        torch.randn(40, 20, dtype=torch.float64),
        torch.randn(6, 21, dtype=torch.float64),
    )
    found = []
    for units in (1.0, 1e-3):
        y = torch.cat([inputs * units, torch.ones(40, 1, dtype=torch.float64)], dim=1)
        w = torch.cat([weight[:, :20] / units, weight[:, 20:]], dim=1)
        found.append(
            solve(Problem(w, y.T @ y / 40, bias_column=True, samples=40), "greedy", Sparsity(0.5))
        )
    assert torch.equal(found[0].mask, found[1].mask)
    assert found[1].error == pytest.approx(
        found[0].error, rel=0.2
    )  # the bias itself is held a little looser


def test_where_damping_starts_is_the_callers_word_and_the_published_method_is_damped_as_published():
    psi = make_moment(10)
    assert metric.metric(psi, samples=30, first=1.0).damping == 0
    with pytest.warns(NumericalWarning):
        assert (
            metric.metric(torch.ones(10, 10, dtype=torch.float64), samples=30, first=1.0).damping
            == 1.0
        )


def test_an_error_budget_is_about_the_error_and_not_about_the_damping():
    y = torch.randn(60, 60, dtype=torch.float64)
    problem = Problem(torch.randn(12, 60, dtype=torch.float64), y.T @ y / 60, samples=60)
    target = ErrorBudget(0.1, relative=True)
    solution = solve(problem, "greedy", target)
    assert solution.damping > 0 and 0.09 < solution.relative_error <= 0.1


@pytest.mark.parametrize("samples", [20, 40])
@pytest.mark.parametrize("solver", ["greedy", "columns", "auto"])
def test_on_new_data_weights_fitted_to_few_samples_are_better_for_the_damping(samples, solver):
    mixing = torch.randn(60, 60, dtype=torch.float64) * torch.logspace(
        0, -1, 60, dtype=torch.float64
    )
    seen, new = (torch.randn(n, 60, dtype=torch.float64) @ mixing.T for n in (samples, 5000))
    weight = torch.randn(12, 60, dtype=torch.float64)
    problem = Problem(weight, seen.T @ seen / samples, samples=samples)
    judge = Problem(weight, new.T @ new / len(new))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        with_rule = judge.error_of(solve(problem, solver, Sparsity(0.7)).weight)
        without = judge.error_of(
            solve(replace(problem, samples=None), solver, Sparsity(0.7)).weight
        )
    assert with_rule < 0.9 * without


def test_dead_columns_need_no_damping():
    psi = make_moment(6)
    psi[2] = psi[:, 2] = 0
    found = metric.metric(psi)
    assert found.damping == 0 and float(found.scale[2]) == 0


def test_a_damping_that_is_too_small_is_refused_with_a_remedy():
    psi = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(ProblemError, match="Use damping ≥"):
        metric.metric(psi, 0.0)


def test_an_indefinite_moment_is_refused():
    psi = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    with pytest.raises(ProblemError, match="not positive semi-definite"):
        metric.metric(psi)


def test_groups_at_once_are_as_one_by_one_and_warn_once():
    x = torch.randn(3, 30, 6, dtype=torch.float64)
    x[1, :, 2] = x[1, :, 4]  # one group is singular,
    x[2, :, 0] = 0  # one has a dead column
    psi = x.mT @ x / 30
    with pytest.warns(NumericalWarning, match=r"singular in 1 of 3 groups \(rank 5 of 6") as seen:
        together = metric.metrics(psi, name="layer 'dw'")
    assert len(seen) == 1 and [m.damping > 0 for m in together] == [False, True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one, alone in zip(together, (metric.metric(p) for p in psi), strict=True):
            torch.testing.assert_close(one.inverse, alone.inverse)
            assert one.damping == alone.damping and torch.equal(one.scale, alone.scale)


def test_inputs_that_are_all_zero_are_told_of():
    with pytest.warns(NumericalWarning, match="layer 'a': all inputs of 50 samples are zero"):
        metric.metric(torch.zeros(4, 4), name="layer 'a'", samples=50)
    with pytest.warns(
        NumericalWarning, match="all inputs are zero"
    ):  # but for the constant of a bias
        metric.metric(torch.diag(torch.tensor([0.0, 0.0, 1.0])), protected=1)


def test_notes_about_layers_are_one_line_at_the_end_of_a_run():
    psi = torch.ones(4, 4)
    with pytest.warns(NumericalWarning) as given:
        with warning_once():
            for scale in (1.0, 2.0):
                metric.metric(psi * scale, name="layer 'a'")
            metric.metric(psi, name="layer 'b'", samples=2)
        assert len(given) == 1
    assert [str(w.message) for w in given] == [
        "1 layer needed regularisation (a: 3 of 4 inputs are dead or duplicated). Normal for image "
        "borders and units that never fire. 1 layer had fewer samples than inputs (b: 2 samples "
        "for 4 inputs). Their errors say little about new data: use more calibration samples."
    ]


def test_a_summary_names_three_layers_and_counts_the_others():
    with (
        pytest.warns(
            NumericalWarning, match=r"5 layers needed .*\(l0: .*; l1: .*; l2: .*; 2 more\)"
        ),
        warning_once(),
    ):
        for index in range(5):
            metric.metric(torch.ones(4, 4), name=f"layer 'l{index}'")


def test_runs_inside_a_run_leave_the_summary_to_it():
    with pytest.warns(NumericalWarning) as given, warning_once():
        for _ in range(2):
            with warning_once():
                metric.metric(torch.ones(4, 4), name="layer 'a'")
        assert not given
    assert len(given) == 1


def test_a_run_that_fails_gives_its_error_and_no_summary():
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        with pytest.raises(KeyError), warning_once():
            metric.metric(torch.ones(4, 4), name="layer 'a'")
            raise KeyError
