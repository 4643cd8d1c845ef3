from __future__ import annotations

import pytest
import torch

from lobs import NByM, Sparsity
from lobs.solvers import Auto, solve
from lobs.solvers.auto import before_refit
from lobs.solvers.least_squares import on_support
from lobs.solvers.problem import Problem


def problem(rows=12, columns=40):
    torch.manual_seed(0)
    x = torch.randn(400, columns) @ (torch.eye(columns) + 0.2 * torch.randn(columns, columns))
    return Problem(torch.randn(rows, columns), (x.T @ x / 400).double(), samples=400)


@pytest.mark.parametrize("gone", [0.3, 0.7, 0.95])
def test_without_swaps_counts_are_exact_and_weights_near_the_best_on_their_support(gone):
    given = problem()
    found = solve(given, before_refit(Auto()), Sparsity(gone, scope="layer"))
    assert found.removed == round(gone * given.weight.numel())
    best = on_support(given, found.mask)
    assert best.error <= found.error * (1 + 1e-9)
    assert found.error <= 1.01 * best.error


def test_a_named_solver_stays_as_it_was_named():
    named = object()
    assert before_refit(named) is named


def test_a_wide_layer_before_a_refit_keeps_its_pattern_without_swaps(monkeypatch):
    given = problem()
    monkeypatch.setattr("lobs.solvers.patterns.nbym._BEFORE_REFIT_UP_TO", 0.0)
    found = solve(given, before_refit(Auto()), NByM(2, 4))
    assert "swaps" not in found.status and "swaps" in solve(given, Auto(), NByM(2, 4)).status
    assert bool((found.mask.view(-1, 4).sum(dim=1) == 2).all())
