from __future__ import annotations

import pytest
import torch

from lobs import LobsError, Problem, Sparsity, solve
from tests.conftest import make_moment


@pytest.mark.parametrize(
    ("weight", "moment", "message"),
    [
        (torch.ones(3), torch.eye(3), "must be"),
        (torch.ones(2, 3), torch.eye(4), "weight asks for"),
        (torch.ones(2, 3, dtype=torch.int64), torch.eye(3), "floating point"),
        (torch.full((2, 3), torch.nan), torch.eye(3), "weight has 6 NaN or infinite"),
        (torch.ones(2, 3), torch.full((3, 3), torch.inf), "moment has 9 NaN or infinite"),
        (torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.5, 1.0]]), "not symmetric"),
        (torch.ones(2, 2), -torch.eye(2), "negative diagonal"),
    ],
)
def test_a_problem_that_cannot_be_is_refused(weight, moment, message):
    with pytest.raises(LobsError, match=message):
        Problem(weight, moment, name="layer 'x'")


def test_unknown_solver_names_the_choices():
    with pytest.raises(LobsError, match=r"unknown solver 'best'. There are: auto, greedy"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), "best", Sparsity(0.5))
    with pytest.raises(LobsError, match="not a solver"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), 3, Sparsity(0.5))


def test_solver_says_what_it_misses():
    with pytest.raises(LobsError, match="not compatible with this problem: missing mean"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), "apozw", Sparsity(0.5))


@pytest.mark.parametrize("name", ["greedy", "lobs", "magnitude", "magnitude+refine"])
def test_parameters_are_taken_as_bare_tensors(name):
    weight, psi = torch.nn.Parameter(torch.randn(4, 6)), make_moment(6).requires_grad_()
    solution = solve(Problem(weight, psi), name, Sparsity(0.5))
    assert not solution.weight.requires_grad and solution.removed == 12


@pytest.mark.parametrize("name", ["greedy", "lobs", "lobs+refine", "magnitude"])
def test_a_layer_without_rows_is_solved_and_one_without_columns_refused(name):
    solution = solve(Problem(torch.zeros(0, 6), make_moment(6)), name, Sparsity(0.5))
    assert solution.weight.shape == (0, 6) and solution.removed == 0
    with pytest.raises(LobsError, match="no columns"):
        Problem(torch.zeros(3, 0), torch.zeros(0, 0))


@pytest.mark.parametrize("name", ["greedy", "lobs", "lobs+refine"])
def test_removing_nothing_gives_the_same_bits(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weight = torch.randn(5, 9).to(dtype)
        assert torch.equal(
            solve(Problem(weight, make_moment(9)), name, Sparsity(0.0)).weight, weight
        )


@pytest.mark.parametrize(
    ("w", "psi"), [(1e-30, 1e-30), (1e30, 1e30), (1e-20, 1e-60), (1e20, 1e-20)]
)
def test_units_do_not_matter(w, psi):
    weight, moment = torch.randn(6, 12, dtype=torch.float64), make_moment(12)
    plain = solve(Problem(weight.float().double(), moment), "greedy", Sparsity(0.6))
    scaled = solve(Problem((weight.float() * w), moment * psi), "greedy", Sparsity(0.6))
    assert torch.equal(plain.mask, scaled.mask)
    assert scaled.relative_error == pytest.approx(plain.relative_error, rel=1e-3)


def test_a_solver_class_is_not_a_solver():
    from lobs import GreedyOBS

    with pytest.raises(LobsError, match="give an instance"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), GreedyOBS, Sparsity(0.5))


def test_grouped_problem_is_its_groups_side_by_side():
    psi = torch.stack([make_moment(6, seed=s) for s in range(3)])
    weight = torch.randn(3, 4, 6, dtype=torch.float64)
    whole = Problem(weight, psi)
    parts = [Problem(w, p) for w, p in zip(weight, psi, strict=True)]
    other = torch.randn_like(weight)
    assert whole.energy == pytest.approx(sum(p.energy for p in parts))
    assert whole.error_of(other) == pytest.approx(
        sum(p.error_of(v) for p, v in zip(parts, other, strict=True))
    )
    everything = solve(whole, "greedy", Sparsity(1.0))
    assert everything.error == pytest.approx(whole.energy)


def test_a_problem_is_never_changed_by_solving():
    weight, psi = torch.randn(4, 8), make_moment(8)
    problem = Problem(weight.clone(), psi.clone(), mean=torch.ones(8))
    for name in ("greedy", "lobs", "lobs+refine", "apozw"):
        solve(problem, name, Sparsity(0.5))
    assert torch.equal(problem.weight, weight) and torch.equal(problem.moment, psi)


def test_reprs_are_one_short_line_without_tensors():
    problem = Problem(torch.randn(3, 50), make_moment(50), samples=200, name="layer 'fc'")
    for text in (repr(problem), repr(solve(problem, "greedy", Sparsity(0.5)))):
        assert "tensor" not in text and "\n" not in text and len(text) < 100
    assert repr(problem) == "Problem(layer 'fc': 3×50 float32, samples=200)"
