from __future__ import annotations

import pytest
import torch

from lobs.errors import ProblemError
from lobs.solvers import linalg
from lobs.solvers.least_squares import (
    approach_least_squares,
    conjugate_gradients,
    least_squares,
)
from tests.conftest import make_moment


def test_the_norm_of_a_large_matrix_is_bounded_from_above(monkeypatch):
    monkeypatch.setattr("lobs.solvers.linalg._LARGE", 4)
    for shape in ((6, 9), (30, 5)):
        matrix = torch.randn(shape)
        exact = float(torch.linalg.svdvals(matrix.double())[0])
        assert exact <= linalg.spectral_norm(matrix) <= 3 * exact
        assert linalg.spectral_norm(matrix) <= linalg.frobenius_norm(matrix)


def test_spectral_norm_is_the_largest_singular_value():
    matrix = torch.randn(5, 9)
    torch.testing.assert_close(
        linalg.spectral_norm(matrix), float(torch.linalg.svdvals(matrix.double())[0])
    )


def test_inverses_tell_which_matrices_have_one():
    good = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    indefinite = torch.tensor([[1.0, 5.0], [5.0, 1.0]], dtype=torch.float64)
    found, definite = linalg.inverses(torch.stack([good, indefinite, good]))
    assert definite.tolist() == [True, False, True]
    torch.testing.assert_close(found[0], torch.linalg.inv(good))


def test_substitution_reads_the_lower_triangle_only():
    matrix, right = (
        torch.randn(3, 5, 5, dtype=torch.float64) + 5 * torch.eye(5),
        torch.randn(3, 5, dtype=torch.float64),
    )
    expected = torch.linalg.solve(matrix.tril(), right)
    torch.testing.assert_close(linalg.substitute(matrix, right), expected)


@pytest.mark.parametrize("f", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_eliminated_variables_take_their_best_values(f, kind):
    u, rows = 7, 3
    x = torch.randn(rows, 4 * (f + u), f + u, dtype=torch.float64)
    gram, linear = x.mT @ x / x.shape[1], torch.randn(rows, f + u, dtype=torch.float64)
    lines = torch.cat([gram[:, :, :f], linear[:, None, :f]], dim=1)
    rest = linalg.Eliminated.from_lines(lines.to(kind))
    inverse = torch.linalg.inv(gram[:, :f, :f])
    cross = torch.cat([gram[:, :f, f:], linear[:, :f, None]], dim=2)
    close = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {}
    torch.testing.assert_close(rest.explained.double(), cross.mT @ inverse @ cross, **close)
    others = torch.randn(rows, u, dtype=torch.float64)
    best = inverse @ (linear[:, :f, None] - gram[:, :f, f:] @ others.unsqueeze(2))
    torch.testing.assert_close(rest.values(others).double(), best.squeeze(2), **close)


def test_what_float32_cannot_eliminate_is_left_to_float64():
    gram = torch.ones(1, 40, 40) + 1e-9 * torch.eye(40)
    lines = torch.cat([gram, torch.ones(1, 1, 40)], dim=1)
    assert linalg.Eliminated.from_lines(lines.clone()) is None
    with pytest.raises(ProblemError, match="damping"):
        linalg.Eliminated.from_lines(lines.double())


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25, 0.0])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_sums_of_squares_are_those_of_float64_whatever_the_scale(kind, scale):
    x = (
        scale
        * torch.randn(7, 3, 9_999, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).to(kind)
    x = x if bool(torch.isfinite(x).all()) else x.clamp(-100, 100)
    exact = x.double().square()
    assert linalg.energy(x) == pytest.approx(float(exact.sum()), rel=1e-6)
    torch.testing.assert_close(linalg.squares(x[0]), exact[0].sum(dim=1), rtol=1e-6, atol=0)
    assert linalg.energy(x[0, 0, :0]) == 0


def _dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def test_conjugate_gradients_end_at_the_solution_after_as_many_steps_as_variables():
    matrix, right = make_moment(12), torch.randn(12, dtype=torch.float64)
    start = torch.randn(12, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, right)
    split = [5, 12 - 5]  # one vector, in two parts

    def product(v):
        return (matrix @ torch.cat(list(v))).split(split)

    scale = matrix.diagonal().split(split)
    for precondition in (lambda r: r, lambda r: [x / d for x, d in zip(r, scale, strict=True)]):
        found = conjugate_gradients(
            product,
            (right - matrix @ start).split(split),
            start.split(split),
            dot=_dot,
            done=lambda now, first: False,
            steps=12,
            precondition=precondition,
        )
        torch.testing.assert_close(torch.cat(list(found)), exact, rtol=1e-6, atol=1e-8)


def test_an_exact_preconditioner_needs_one_step():
    matrix, right = make_moment(12), torch.randn(12, dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    (found,) = conjugate_gradients(
        lambda v: [matrix @ v[0]],
        [right],
        [torch.zeros_like(right)],
        dot=_dot,
        done=lambda now, first: False,
        steps=1,
        precondition=lambda r: [inverse @ r[0]],
    )
    torch.testing.assert_close(found, inverse @ right)


def test_conjugate_gradients_stop_when_they_are_told_to():
    calls = []

    def product(v):
        calls.append(v)
        return [2 * v[0]]

    (found,) = conjugate_gradients(
        product,
        [torch.ones(3)],
        [torch.zeros(3)],
        dot=_dot,
        done=lambda now, first: bool(now <= 1e-8 * first),
        steps=50,
    )
    assert len(calls) == 1 and torch.equal(found, torch.full((3,), 0.5))


def test_rows_are_systems_of_their_own_and_stay_on_their_supports():
    gram, weight = make_moment(10), torch.randn(6, 10, dtype=torch.float64)
    mask = torch.rand(6, 10) < 0.6
    found = approach_least_squares(gram, weight, mask, weight, steps=20)
    torch.testing.assert_close(found, least_squares(gram, weight, mask), rtol=1e-6, atol=1e-8)
    assert bool((found[~mask] == 0).all())
    alone = approach_least_squares(gram, weight[2:3], mask[2:3], weight[2:3], steps=20)
    torch.testing.assert_close(found[2:3], alone, rtol=1e-6, atol=1e-8)
