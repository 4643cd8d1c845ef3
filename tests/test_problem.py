from __future__ import annotations

import pytest
import torch

from lobs import LobsError, Problem, solve
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
    with pytest.raises(LobsError, match=r"unknown solver 'best'. There are: exact"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), "best", 0.5)
    with pytest.raises(LobsError, match="not a solver"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), 3, 0.5)


def test_solver_says_what_it_misses():
    with pytest.raises(LobsError, match="not compatible with this problem: missing mean"):
        solve(Problem(torch.ones(1, 2), torch.eye(2)), "apozw", 0.5)


def test_grouped_problem_is_its_groups_side_by_side():
    psi = torch.stack([make_moment(6, seed=s) for s in range(3)])
    weight = torch.randn(3, 4, 6, dtype=torch.float64)
    whole = Problem(weight, psi)
    parts = [Problem(w, p) for w, p in zip(weight, psi, strict=True)]
    other = torch.randn_like(weight)
    assert whole.energy == pytest.approx(sum(p.energy for p in parts))
    assert whole.error_of(other) == pytest.approx(sum(p.error_of(v) for p, v in zip(parts, other, strict=True)))
    everything = solve(whole, "exact", 1.0)
    assert everything.error == pytest.approx(whole.energy)


def test_a_problem_is_never_changed_by_solving():
    weight, psi = torch.randn(4, 8), make_moment(8)
    problem = Problem(weight.clone(), psi.clone(), mean=torch.ones(8))
    for name in ("exact", "lobs", "lobs+refine", "apozw"):
        solve(problem, name, 0.5)
    assert torch.equal(problem.weight, weight) and torch.equal(problem.moment, psi)
