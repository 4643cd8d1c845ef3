"""Layers of many narrow groups are solved in one batch, as well as one group after another."""

from __future__ import annotations

import pytest
import torch

from lobs.solvers import GreedyOBS, linalg, solve
from lobs.solvers.least_squares import on_support
from lobs.solvers.problem import Problem
from tests.conftest import make_moment


def problem(groups=24, rows=1, columns=9, *, bias=False, dead=False):
    d = columns + bias
    g = torch.Generator().manual_seed(0)
    moments = torch.stack([make_moment(d, 60, seed=k) for k in range(groups)])
    if dead:
        moments[:2] = 0
    return Problem(
        torch.randn(groups, rows, d, generator=g),
        moments,
        bias_column=bias,
        samples=400,
        positions=1 if bias else columns,
        row_weight=torch.rand(groups, rows, generator=g) + 0.1,
    )


CASES = [(1, False, False), (3, True, False), (2, False, True)]


@pytest.mark.parametrize(("rows", "bias", "dead"), CASES)
def test_the_fit_on_a_support_is_that_of_single_groups(rows, bias, dead, monkeypatch):
    posed = problem(rows=rows, bias=bias, dead=dead)
    mask = torch.rand(posed.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 0] = True  # a row that loses nothing
    if bias:
        mask[..., -1] = True
    one = on_support(posed, mask)
    monkeypatch.setattr(linalg, "MANY", 1000)
    each = on_support(posed, mask)
    torch.testing.assert_close(one.weight, each.weight, rtol=1e-4, atol=1e-5)
    assert one.error == pytest.approx(each.error, rel=1e-4)


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (2, True)])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
def test_the_search_ends_no_higher_than_that_of_single_groups(rows, bias, keep, monkeypatch):
    def weighted(found):
        part = posed.row_errors_of(found.weight) * posed.importance
        return float(part.sum())

    posed = problem(rows=rows, bias=bias)
    one = solve(posed, "auto", keep=keep)
    monkeypatch.setattr(linalg, "MANY", 1000)
    each = solve(posed, "auto", keep=keep)
    assert one.kept == each.kept
    assert weighted(one) <= 1.02 * weighted(each)


def test_one_wide_row_ends_no_higher_from_the_greedy_alone():
    g = torch.Generator().manual_seed(0)
    wide = Problem(torch.randn(1, 520, generator=g), make_moment(520, 1500), samples=6000)
    found, admm = (solve(wide, name, keep=0.5) for name in ("auto", "admm"))
    assert found.kept == 260 and found.error <= 1.02 * admm.error


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (3, True)])
def test_the_greedy_deletes_in_the_same_order(rows, bias, monkeypatch):
    posed = problem(rows=rows, bias=bias)
    one = GreedyOBS().path(posed)
    monkeypatch.setattr(linalg, "MANY", 1000)
    each = GreedyOBS(backend="torch").path(posed)
    assert float((one.columns == each.columns).double().mean()) > 0.99
    torch.testing.assert_close(one.curve, each.curve.to(one.curve), rtol=1e-3, atol=1e-6)
