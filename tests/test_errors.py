from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import lobs
from lobs.errors import NumericalWarning, caution


def test_a_warning_points_at_the_line_that_called_lobs():
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(50, 6)
    with pytest.warns(NumericalWarning, match="needed regularisation") as said:
        lobs.prune(model, [x], lobs.Sparsity(0.5), held_out=[])
        line = inspect.currentframe().f_lineno - 1
    ours = [w for w in said if issubclass(w.category, NumericalWarning)]
    assert any("held_out has no samples" in str(w.message) for w in ours)
    assert {(w.filename, w.lineno) for w in ours} == {(__file__, line)}


def test_a_problem_solved_alone_warns_of_the_line_that_solved_it():
    problem = lobs.Problem(torch.randn(3, 4), torch.ones(4, 4))
    with pytest.warns(NumericalWarning) as said:
        lobs.solve(problem, "greedy", lobs.Sparsity(0.5))
        line = inspect.currentframe().f_lineno - 1
    assert {(w.filename, w.lineno) for w in said} == {(__file__, line)}


def test_a_line_is_warned_of_once_by_default():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            caution("a number was helped")
    assert [str(w.message) for w in said] == ["a number was helped"]
