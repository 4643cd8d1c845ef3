from __future__ import annotations

import pytest
import torch
from experiments.dong2017.nettrim import moment_bytes, net_trim, quadratic_form_bytes

from lobs import LobsError, Problem, Sparsity, solve


def layer(rows=4, d=8, n=120, bias=False):
    x = torch.randn(d, n, dtype=torch.float64)
    if bias:
        x[-1] = 1
    return torch.randn(rows, d, dtype=torch.float64), x


def relative_error(v, w, x):
    y = (w @ x).clamp_min(0)
    return float(((v @ x).clamp_min(0) - y).norm() / y.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("xi", [0.05, 0.2, 0.5])
def test_it_meets_the_constraint_with_less_l1_than_the_dense_layer(xi, bias):
    w, x = layer(bias=bias)
    found = net_trim(w, x, xi, bias_column=bias, iterations=5000, tolerance=1e-6)
    assert found.converged
    assert found.relative_error == pytest.approx(relative_error(found.weight, w, x), rel=1e-6)
    assert found.relative_error <= xi * 1.01
    columns = slice(0, -1) if bias else slice(None)
    assert float(found.weight[:, columns].abs().sum()) < float(w[:, columns].abs().sum())


def test_it_is_no_worse_in_l1_than_any_feasible_point_nearby():
    w, x = layer()
    y = (w @ x).clamp_min(0)
    found = net_trim(w, x, 0.3, iterations=20000, tolerance=1e-8)
    best = float(found.weight.abs().sum())
    generator = torch.Generator().manual_seed(0)
    feasible = 0
    for _ in range(3000):
        step = torch.rand((), generator=generator) * 0.3
        v = found.weight * (1 - 0.05 * step) + 0.02 * step * torch.randn(
            w.shape, generator=generator, dtype=torch.float64
        )
        z = v @ x
        within = (
            float((z - y)[y > 0].norm()) <= 0.3 * float(y.norm()) and float(z[y == 0].max()) <= 0
        )
        feasible += within
        assert not within or float(v.abs().sum()) >= best * (1 - 1e-3)
    scaled = [
        v
        for t in torch.linspace(0, 1, 21)
        if _feasible(v := found.weight + t * (w - found.weight), x, y)
    ]
    assert all(float(v.abs().sum()) >= best * (1 - 1e-3) for v in scaled) and scaled


def _feasible(v, x, y):
    z = v @ x
    return (
        float((z - y)[y > 0].norm()) <= 0.3 * float(y.norm()) * (1 + 1e-6)
        and float(z[y == 0].max()) <= 1e-6
    )


def test_a_larger_allowance_keeps_fewer_weights():
    w, x = layer(6, 20, 300)
    kept = [
        int((net_trim(w, x, xi, iterations=3000).weight != 0).sum()) for xi in (0.02, 0.2, 0.5, 0.9)
    ]
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]


def test_no_allowance_gives_the_dense_outputs_back():
    w, x = layer()
    assert net_trim(w, x, 0.0, iterations=20000, tolerance=1e-7).relative_error < 1e-2


def test_at_its_own_count_greedy_deletion_moves_the_outputs_less():
    w = torch.randn(10, 30, dtype=torch.float64)
    x = torch.randn(30, 5, dtype=torch.float64) @ torch.randn(
        5, 1000, dtype=torch.float64
    ) + 0.1 * torch.randn(30, 1000, dtype=torch.float64)
    trimmed = net_trim(w, x, 0.2, iterations=3000)
    removed = float((trimmed.weight == 0).double().mean())
    assert 0.2 < removed < 0.95
    greedy = solve(Problem(w, x @ x.T / x.shape[1]), "greedy", Sparsity(removed))
    assert relative_error(greedy.weight, w, x) < relative_error(trimmed.weight, w, x)


def test_memory_grows_with_samples_for_the_quadratic_form_alone():
    assert (
        quadratic_form_bytes(2000, 300, 100)
        == 2 * quadratic_form_bytes(1000, 300, 100)
        == 2 * 48 * 10**9
    )
    assert moment_bytes(300) == 2 * 300 * 300 * 8


def test_mistakes_are_named():
    w, x = layer()
    with pytest.raises(LobsError, match="do not multiply"):
        net_trim(w, x.T, 0.1)
    with pytest.raises(LobsError, match="not negative"):
        net_trim(w, x, -0.1)
