from __future__ import annotations

import pytest
import torch

from lobs import ErrorBudget, GreedyOBS, Problem, Sparsity, solve
from tests import naive
from tests.conftest import make_moment


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_exact_equals_a_greedy_that_resolves_every_candidate(backend, bias):
    weight, psi = torch.randn(3, 8, dtype=torch.float64), make_moment(8)
    problem = Problem(weight, psi, bias_column=bias)
    mask, curve = naive.greedy(weight, psi, problem.prunable, protected=int(bias))
    path = GreedyOBS(backend=backend).path(problem)
    torch.testing.assert_close(path.curve, curve, rtol=1e-9, atol=1e-12)
    for count in range(problem.prunable + 1):
        mask, _ = naive.greedy(weight, psi, count, protected=int(bias))
        assert torch.equal(path.mask_at(count), mask)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-3)])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("correlated", [0.5, 3.0])
def test_sum_of_losses_is_the_recomputed_error(backend, dtype, tolerance, correlated):
    weight = torch.randn(20, 150).to(dtype)
    problem = Problem(weight, make_moment(150, correlated=correlated), bias_column=True)
    path = GreedyOBS(backend=backend).path(problem)
    for fraction in (0.05, 0.5, 0.9, 0.99, 1.0):
        solution = path.solve(Sparsity(fraction))
        assert abs(float(path.curve[solution.removed]) / solution.error - 1) < tolerance
        assert solution.losses is not None and len(solution.losses) == solution.removed
        assert abs(float(solution.losses.sum()) / solution.error - 1) < tolerance


def test_weights_are_already_optimal_on_their_support():
    weight, psi = torch.randn(6, 30, dtype=torch.float64), make_moment(30)
    solution = solve(Problem(weight, psi), "greedy", Sparsity(0.7))
    torch.testing.assert_close(solution.weight, naive.best_on_support(weight, psi, solution.mask))


def test_curve_is_error_plus_damping_times_the_move():
    weight, psi = torch.randn(6, 30, dtype=torch.float64), make_moment(30)
    solution = solve(Problem(weight, psi, damping=0.1), "greedy", Sparsity(0.7))
    assert solution.damping == 0.1 and solution.curve is not None
    moved = float((solution.weight - weight).square().sum())
    torch.testing.assert_close(
        float(solution.curve[solution.removed]), solution.error + 0.1 * moved
    )


def test_backends_choose_the_same_mask():
    problem = Problem(torch.randn(40, 200), make_moment(200), bias_column=True)
    masks = [GreedyOBS(backend=b).path(problem).mask_at(6000) for b in ("torch", "compiled")]
    assert float((masks[0] != masks[1]).double().mean()) < 1e-3


def test_removed_weights_form_a_prefix_of_every_row():
    path = GreedyOBS().path(Problem(torch.randn(8, 40), make_moment(40)))
    small, large = path.mask_at(100), path.mask_at(200)
    assert not bool((large & ~small).any())


def test_error_budget_takes_as_many_as_it_can():
    problem = Problem(torch.randn(8, 40, dtype=torch.float64), make_moment(40))
    solution = solve(problem, "greedy", ErrorBudget(0.3, relative=True))
    assert solution.curve is not None
    one_more = float(solution.curve[solution.removed + 1])
    assert solution.error <= 0.09 * problem.energy < one_more


def test_dead_inputs_go_first_and_cost_nothing():
    psi = make_moment(10)
    psi[:3] = 0
    psi[:, :3] = 0
    solution = solve(Problem(torch.randn(4, 10), psi), "greedy", Sparsity(0.3))
    assert not bool(solution.mask[:, :3].any()) and solution.error == 0 and solution.damping == 0


def test_dead_inputs_stay_free_where_others_need_damping():
    psi = make_moment(10)
    psi[0] = psi[:, 0] = 0
    psi[2], psi[:, 2] = psi[1], psi[:, 1]
    psi[2, 2] = psi[1, 2] = psi[2, 1] = psi[1, 1]
    weight = torch.randn(4, 10)
    weight[:, 0] = 1000
    for name in ("greedy", "lobs"):
        solution = solve(Problem(weight, psi), name, Sparsity(4 / 40))
        assert solution.damping > 0 and not bool(solution.mask[:, 0].any())
    assert solve(Problem(weight, psi), "greedy", ErrorBudget(0.0)).removed >= 4


def test_ill_conditioned_float32_is_swept_in_float64():
    # A stale or float32 inverse misses here; the sum of losses must still be the error.
    weight, psi = torch.randn(10, 60), make_moment(60, correlated=30.0, n=61)
    solution = solve(Problem(weight, psi), "greedy", Sparsity(0.5))
    assert solution.curve is not None
    assert abs(float(solution.curve[solution.removed]) / (solution.error + 1e-30) - 1) < 1e-2
