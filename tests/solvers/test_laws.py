from __future__ import annotations

import pytest
import torch

from lobs import LOBS, SOLVERS, LobsError, Problem, Refine, Sparsity, solve
from tests import naive
from tests.conftest import make_moment
from tests.laws import LAWS


def problems() -> dict[str, Problem]:
    def problem(rows, d, *, dtype=torch.float32, bias=False, groups=0, psi=None):
        shape = (groups, rows, d) if groups else (rows, d)
        if psi is None:
            psi = (
                torch.stack([make_moment(d, seed=s) for s in range(groups)])
                if groups
                else make_moment(d)
            )
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        curvature = torch.rand(shape, generator=torch.Generator().manual_seed(2))
        return Problem(
            weight, psi, bias_column=bias, mean=torch.rand(*shape[:-2], d), curvature=curvature
        )

    dead = make_moment(9)
    dead[[2, 5]] = 0
    dead[:, [2, 5]] = 0
    duplicate = make_moment(9)
    duplicate[:, 3] = duplicate[:, 4]
    duplicate[3] = duplicate[4]
    return {
        "float32": problem(5, 11),
        "float64": problem(5, 11, dtype=torch.float64),
        "bfloat16": problem(3, 7, dtype=torch.bfloat16),
        "bias": problem(4, 10, bias=True),
        "groups": problem(3, 6, groups=2, bias=True),
        "one column": problem(4, 1),
        "one row": problem(1, 12),
        "dead inputs": problem(4, 9, psi=dead),
        "duplicate inputs": problem(4, 9, psi=duplicate),
        "too few samples": problem(4, 9, psi=make_moment(9, n=4)),
        "no input at all": problem(4, 9, psi=torch.zeros(9, 9, dtype=torch.float64)),
        "ties": Problem(
            torch.ones(4, 6), torch.eye(6), mean=torch.ones(6), curvature=torch.ones(4, 6)
        ),
        "huge": problem(3, 8, psi=make_moment(8) * 1e30),
        "tiny": problem(3, 8, psi=make_moment(8) * 1e-30),
    }


PROBLEMS = problems()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_obeys(name, kind, law):
    law(name, PROBLEMS[kind])


@pytest.mark.parametrize("kind", [k for k in PROBLEMS if k != "groups"])
@pytest.mark.parametrize("name", SOLVERS)
def test_refine_is_never_worse(name, kind):
    problem = PROBLEMS[kind]
    for fraction in (0.2, 0.5, 0.8):
        inner = solve(problem, name, Sparsity(fraction))
        resolved = solve(problem, Refine(SOLVERS[name], swaps=False), Sparsity(fraction))
        assert torch.equal(inner.mask, resolved.mask)
        assert resolved.error <= inner.error * (1 + 1e-12)
        swapped = solve(problem, Refine(SOLVERS[name]), Sparsity(fraction))
        assert swapped.removed == inner.removed
        assert swapped.error <= resolved.error * (1 + 1e-9)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("seed", range(4))
def test_exhaustive_search_bounds_every_solver_from_below(name, seed):
    weight = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    psi = make_moment(4, seed=seed)
    for count in (1, 3, 5):
        best = naive.exhaustive(weight, psi, count)
        found = solve(
            Problem(weight, psi, mean=torch.ones(4), curvature=torch.ones(2, 4)),
            name,
            Sparsity(count / 8),
        )
        assert found.error >= best * (1 - 1e-9)


def test_identity_moment_reduces_to_magnitude():
    weight = torch.randn(6, 20)
    problem = Problem(weight, torch.eye(20))
    for fraction in (0.1, 0.5, 0.95):
        wanted = solve(problem, "magnitude", Sparsity(fraction))
        for name in ("greedy", "lobs"):
            got = solve(problem, name, Sparsity(fraction))
            assert torch.equal(got.mask, wanted.mask)
            torch.testing.assert_close(got.weight, wanted.weight)


def test_diagonal_moment_reduces_to_obd():
    weight = torch.randn(6, 20)
    problem = Problem(weight, torch.diag(torch.rand(20) + 0.01))
    for fraction in (0.1, 0.5, 0.95):
        wanted = solve(problem, "obd", Sparsity(fraction))
        for name in ("greedy", "lobs"):
            got = solve(problem, name, Sparsity(fraction))
            assert torch.equal(got.mask, wanted.mask)
            torch.testing.assert_close(got.weight, wanted.weight)


def test_lobs_is_the_published_algorithm_step_by_step():
    for bias in (False, True):
        weight, psi = torch.randn(5, 12, dtype=torch.float64), make_moment(12)
        problem = Problem(weight, psi, bias_column=bias)
        for count in (1, 17, problem.prunable):
            expected, mask = naive.lobs(weight, psi, count, protected=int(bias))
            got = solve(problem, "lobs", Sparsity(count / problem.prunable))
            assert torch.equal(got.mask, mask)
            torch.testing.assert_close(got.weight, expected)


def test_lobs_in_panels_is_lobs_one_deletion_at_a_time(monkeypatch):
    monkeypatch.setattr("lobs.solvers.layerwise_obs._PANEL", 4)
    # Rows of unlike size give unlike counts: in some panels a few of them have nothing left to
    # delete.
    weight, psi = (
        torch.randn(7, 23, dtype=torch.float64) * torch.logspace(-1, 1, 7).unsqueeze(1),
        make_moment(23),
    )
    problem = Problem(weight, psi, bias_column=True)
    for count in (3, 50, 101, problem.prunable):
        expected, mask = naive.lobs(weight, psi, count, protected=1)
        got = solve(problem, "lobs", Sparsity(count / problem.prunable))
        assert torch.equal(got.mask, mask)
        torch.testing.assert_close(got.weight, expected)


def test_refine_solves_least_squares_on_the_support():
    weight, psi = torch.randn(5, 12, dtype=torch.float64), make_moment(12)
    got = solve(Problem(weight, psi), "magnitude+refine", Sparsity(0.6))
    torch.testing.assert_close(got.weight, naive.best_on_support(weight, psi, got.mask))


def test_random_repeats_with_its_seed_and_differs_with_another():
    from lobs import Scored

    problem = Problem(torch.randn(5, 12), make_moment(12))
    same = [solve(problem, Scored("random", seed=s), Sparsity(0.5)).mask for s in (3, 3, 4)]
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])


def test_lobs_damps_a_singular_moment_by_one_over_alpha():
    samples = torch.randn(5, 12, dtype=torch.float64)
    problem = Problem(torch.randn(3, 12), samples.T @ samples / 5)
    assert solve(problem, "lobs", Sparsity(0.5)).damping == 1e-4
    assert solve(problem, LOBS(alpha=1e3), Sparsity(0.5)).damping == 1e-3
    assert solve(Problem(torch.randn(3, 12), make_moment(12)), "lobs", Sparsity(0.5)).damping == 0
    with pytest.raises(LobsError, match="must be positive"):
        LOBS(alpha=0)
