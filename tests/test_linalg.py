from __future__ import annotations

import warnings

import pytest
import torch

from lobs import linalg
from lobs.errors import NumericalWarning, ProblemError
from tests.conftest import make_moment


def true_inverse(metric):
    return metric.inverse / metric.scale / metric.scale.unsqueeze(1)


def test_metric_inverts_the_damped_moment():
    psi = make_moment(12)
    for damping in (0.0, 0.3):
        expected = torch.linalg.inv(psi + damping * torch.eye(12, dtype=torch.float64))
        torch.testing.assert_close(true_inverse(linalg.metric(psi, damping)), expected)


def test_woodbury_recursion_ends_at_the_damped_inverse():
    samples = torch.randn(50, 8, dtype=torch.float64)
    psi = samples.T @ samples / 50
    for alpha in (1e4, 1e8):
        expected = true_inverse(linalg.metric(psi, 1 / alpha))
        torch.testing.assert_close(linalg.woodbury_inverse(samples, alpha), expected, rtol=1e-6, atol=1e-8)


def test_well_determined_moment_is_not_damped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linalg.metric(make_moment(20)).damping == 0


def test_singular_moment_is_damped_and_announced():
    samples = torch.randn(5, 12, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match=r"layer 'fc': its input moment Ψ is singular \(rank 5 of 12; 5 samples\)"):
        metric = linalg.metric(samples.T @ samples / 5, name="layer 'fc'", samples=5)
    assert 0 < metric.damping < 1e-4


def test_dead_columns_need_no_damping():
    psi = make_moment(6)
    psi[2] = psi[:, 2] = 0
    metric = linalg.metric(psi)
    assert metric.damping == 0 and float(metric.scale[2]) == 0


def test_a_damping_that_is_too_small_is_refused_with_a_remedy():
    psi = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(ProblemError, match="Use damping ≥"):
        linalg.metric(psi, 0.0)


def test_an_indefinite_moment_is_refused():
    psi = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    with pytest.raises(ProblemError, match="not positive semi-definite"):
        linalg.metric(psi)


def test_the_norm_of_a_large_matrix_is_bounded_from_above(monkeypatch):
    monkeypatch.setattr("lobs.linalg._LARGE", 4)
    for shape in ((6, 9), (30, 5)):
        matrix = torch.randn(shape)
        exact = float(torch.linalg.svdvals(matrix.double())[0])
        assert exact <= linalg.spectral_norm(matrix) <= 3 * exact
        assert linalg.spectral_norm(matrix) <= linalg.frobenius_norm(matrix)


def test_spectral_norm_is_the_largest_singular_value():
    matrix = torch.randn(5, 9)
    torch.testing.assert_close(linalg.spectral_norm(matrix), float(torch.linalg.svdvals(matrix.double())[0]))


def test_groups_at_once_are_as_one_by_one_and_warn_once():
    x = torch.randn(3, 30, 6, dtype=torch.float64)
    x[1, :, 2] = x[1, :, 4]  # one group is singular,
    x[2, :, 0] = 0  # one has a dead column
    psi = x.mT @ x / 30
    with pytest.warns(NumericalWarning, match=r"singular in 1 of 3 groups \(rank 5 of 6") as seen:
        together = linalg.metrics(psi, name="layer 'dw'")
    assert len(seen) == 1 and [m.damping > 0 for m in together] == [False, True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for metric, alone in zip(together, (linalg.metric(p) for p in psi), strict=True):
            torch.testing.assert_close(metric.inverse, alone.inverse)
            assert metric.damping == alone.damping and torch.equal(metric.scale, alone.scale)
