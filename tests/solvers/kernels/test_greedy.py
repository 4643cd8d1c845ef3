from __future__ import annotations

import pytest
import torch

from lobs.errors import SolverError
from lobs.solvers.kernels import greedy
from tests.conftest import make_moment


def inverse(d, **settings):
    psi = make_moment(d, **settings)
    s = psi.diagonal().sqrt()
    return torch.linalg.inv(psi / s / s.unsqueeze(1))


@pytest.mark.parametrize("protected", [0, 1, 3])
@pytest.mark.parametrize("d", [4, 31, 32, 33, 64, 65, 100, 300])
def test_backends_agree_in_float64(d, protected):
    a, w = inverse(d), torch.randn(5, d, dtype=torch.float64)
    (order, losses), (order2, losses2) = (
        greedy(a, w, protected, backend=b) for b in ("torch", "compiled")
    )
    assert torch.equal(order, order2)
    torch.testing.assert_close(losses, losses2)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_every_free_column_goes_once(backend):
    order, losses = greedy(inverse(50).float(), torch.randn(7, 50), 2, backend=backend)
    assert torch.equal(
        order.sort(dim=1).values, torch.arange(2, 50, dtype=torch.int32).expand(7, 48)
    )
    assert bool((losses >= 0).all())


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_zero_rows_and_huge_rows(backend):
    w = torch.stack([torch.zeros(40), torch.randn(40) * 1e30, torch.randn(40) * 1e-30])
    order, losses = greedy(inverse(40).float(), w, 0, backend=backend)
    assert bool(torch.isfinite(losses[0]).all()) and float(losses[0].sum()) == 0
    assert bool(torch.isfinite(losses).all()) and float(losses[1].sum()) > 1e55
    assert all(len(set(row.tolist())) == 40 for row in order)


def test_nothing_to_remove():
    for backend in ("torch", "compiled"):
        order, losses = greedy(torch.eye(1), torch.ones(3, 1), 1, backend=backend)
        assert order.shape == losses.shape == (3, 0)


def test_unknown_backend_names_the_choices():
    with pytest.raises(SolverError, match="auto, compiled, torch"):
        greedy(torch.eye(2), torch.ones(1, 2), 0, backend="gpu")
