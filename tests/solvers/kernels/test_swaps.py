from __future__ import annotations

import itertools

import pytest
import torch

from lobs.solvers import kernels
from tests.conftest import make_moment


def batch(rows, m, kept, seed=0):
    """Small least-squares problems: Gram matrices, linear terms, weights and supports."""
    generator = torch.Generator().manual_seed(seed)
    moments = torch.stack([make_moment(m, seed=seed + r) for r in range(rows)])
    scale = moments.diagonal(dim1=1, dim2=2).sqrt()
    gram = moments / scale.unsqueeze(1) / scale.unsqueeze(2)
    weight = torch.randn(rows, m, dtype=torch.float64, generator=generator)
    inside = torch.zeros(rows, m, dtype=torch.bool)
    inside[:, :kept] = True
    return gram, (weight.unsqueeze(1) @ gram).squeeze(1), weight, inside


def error(gram, linear, weight, inside):
    v = torch.zeros_like(weight)
    if inside.any():
        v[inside] = torch.linalg.solve(gram[inside][:, inside], linear[inside])
    return float((v - weight) @ gram @ (v - weight))


def errors(gram, linear, weight, inside):
    return torch.tensor(
        [error(*row) for row in zip(gram, linear, weight, inside, strict=True)], dtype=torch.float64
    )


@pytest.mark.parametrize("m", [1, 5, 24])
def test_backends_take_the_same_swaps(m):
    gram, linear, _, inside = batch(7, m, m // 2)
    results = []
    for backend in ("torch", "compiled"):
        chosen = inside.clone()
        kernels.improve(
            gram.clone(),
            linear.clone(),
            chosen,
            torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            backend=backend,
        )
        results.append(chosen)
    assert torch.equal(*results)


@pytest.mark.parametrize("seed", range(5))
def test_swaps_lower_the_error_and_leave_no_better_swap(seed):
    gram, linear, weight, inside = batch(6, 9, 4, seed)
    before, chosen = errors(gram, linear, weight, inside), inside.clone()
    # With nothing to gain for others no row trades, so every row must end in its own local optimum.
    for row in range(6):
        one = slice(row, row + 1)
        kernels.improve(
            gram[one].clone(), linear[one].clone(), chosen[one], torch.ones(1, dtype=torch.float64)
        )
    after = errors(gram, linear, weight, chosen)
    assert bool((after <= before + 1e-12).all()) and bool((chosen.sum(dim=1) == 4).all())
    for row in range(6):
        for p, q in itertools.product(
            chosen[row].nonzero().flatten(), (~chosen[row]).nonzero().flatten()
        ):
            other = chosen[row].clone()
            other[p], other[q] = False, True
            assert error(gram[row], linear[row], weight[row], other) >= float(after[row]) * (
                1 - 1e-5
            )


def test_rows_trade_by_importance_and_keep_the_number():
    gram, linear, weight, inside = batch(8, 10, 3)
    importance = torch.tensor([100.0] + [1.0] * 7, dtype=torch.float64)
    chosen = inside.clone()
    kernels.improve(gram.clone(), linear.clone(), chosen, importance)
    assert int(chosen.sum()) == int(inside.sum())
    assert int(chosen[0].sum()) > 3
    weighted = [
        float((errors(gram, linear, weight, mask) * importance).sum()) for mask in (inside, chosen)
    ]
    assert weighted[1] < weighted[0]


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_what_swaps_say_they_gained_is_what_the_errors_fell_by(backend):
    gram, linear, weight, inside = batch(8, 12, 5)
    chosen = inside.clone()
    _, gained = kernels.improve(
        gram.clone(), linear.clone(), chosen, torch.ones(8, dtype=torch.float64), backend=backend
    )
    fell = errors(gram, linear, weight, inside) - errors(gram, linear, weight, chosen)
    torch.testing.assert_close(gained, fell, rtol=1e-8, atol=1e-9)
    assert float(gained.sum()) > 0
