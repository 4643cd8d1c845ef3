from __future__ import annotations

import torch

from lobs import linalg


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


def test_inverses_tell_which_matrices_have_one():
    good = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    indefinite = torch.tensor([[1.0, 5.0], [5.0, 1.0]], dtype=torch.float64)
    found, definite = linalg.inverses(torch.stack([good, indefinite, good]))
    assert definite.tolist() == [True, False, True]
    torch.testing.assert_close(found[0], torch.linalg.inv(good))


def test_substitution_reads_the_lower_triangle_only():
    matrix, right = torch.randn(3, 5, 5, dtype=torch.float64) + 5 * torch.eye(5), torch.randn(3, 5, dtype=torch.float64)
    expected = torch.linalg.solve(matrix.tril(), right)
    torch.testing.assert_close(linalg.substitute(matrix, right), expected)
