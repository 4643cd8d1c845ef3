"""Laws that hold for every solver in SOLVERS: functions of a solver's name and a problem."""

from __future__ import annotations

import torch

from lobs import ErrorBudget, Problem, Sparsity, solve
from tests import naive


def exact_count(name: str, problem: Problem) -> None:
    for count in range(problem.prunable + 1):
        solution = solve(problem, name, Sparsity(count / problem.prunable))
        assert solution.removed == count
        assert int((~solution.mask).sum()) == count


def zeros_are_zeros_and_protected_columns_stay(name: str, problem: Problem) -> None:
    solution = solve(problem, name, Sparsity(0.6))
    assert bool((solution.weight[~solution.mask] == 0).all())
    if problem.bias_column:
        assert bool(solution.mask[..., -1].all())


def error_is_recomputed(name: str, problem: Problem) -> None:
    solution = solve(problem, name, Sparsity(0.5))
    groups = zip(solution.weight.view(-1, *problem.weight.shape[-2:]), problem.groups, strict=True)
    expected = sum(naive.quadratic(v.double() - w.double(), psi) for v, (w, psi) in groups)
    torch.testing.assert_close(solution.error, expected, rtol=1e-9, atol=1e-12)


def nothing_removed_changes_nothing(name: str, problem: Problem) -> None:
    solution = solve(problem, name, Sparsity(0.0))
    torch.testing.assert_close(solution.weight, problem.weight, rtol=1e-4, atol=1e-6)
    assert solution.relative_error < 1e-4


def error_budget_is_kept(name: str, problem: Problem) -> None:
    for epsilon in (0.0, 0.03, 0.2, 0.5, 1.0):
        solution = solve(problem, name, ErrorBudget(epsilon, relative=True))
        # Even with nothing removed the weights are rounded once to float32.
        assert solution.relative_error <= epsilon + 1e-6


def shape_and_type_are_kept(name: str, problem: Problem) -> None:
    solution = solve(problem, name, Sparsity(0.3))
    assert solution.weight.shape == solution.mask.shape == problem.weight.shape
    assert solution.weight.dtype == problem.weight.dtype


def the_same_twice(name: str, problem: Problem) -> None:
    a, b = solve(problem, name, Sparsity(0.7)), solve(problem, name, Sparsity(0.7))
    assert torch.equal(a.weight, b.weight) and torch.equal(a.mask, b.mask)


LAWS = [
    exact_count,
    zeros_are_zeros_and_protected_columns_stay,
    error_is_recomputed,
    nothing_removed_changes_nothing,
    error_budget_is_kept,
    shape_and_type_are_kept,
    the_same_twice,
]
