"""Factorisations, norms and sums of squares. No other file calls `torch.linalg`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import ProblemError

# Added to a diagonal of ones, one after another, until it can be factorised.
_RIDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_PANEL = 32  # columns factorised at a time, so that the rest is matrix products
_LARGE = 1024  # rows and columns from which a singular value decomposition takes minutes
_PIECE = 2**20  # numbers squared at a time, so that they stay in the cache
_UNDERFLOW = 1e-30  # sums of float32 squares below this have lost digits
_STRIP = 2**23  # numbers processed at a time where a copy of the whole would be too large
MANY = 16  # groups from which one batch is faster
_NARROW = 64  # columns of a group, at most: a round of swaps then looks at all of them
_MOST = 2**25  # numbers in the matrices of all rows, at most


def strip_size(width: int) -> int:
    """Return how many rows of `width` numbers are processed together."""
    return max(1, _STRIP // max(1, width))


def largest_entry(tensor: Tensor) -> float:
    """Return the largest absolute entry without a copy; infinity where one is not finite."""
    if not tensor.numel():
        return 0.0
    low, high = float(tensor.amin()), float(tensor.amax())
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf


def squares(lines: Tensor) -> Tensor:
    """Return Σx² of every row in float64.

    Sums are taken in float32 where that can hold them: a tenth of the time, and 1e-7 off.
    """
    exact = lines.dtype == torch.float64
    y = lines if exact else lines.to(torch.float32)
    found = y.square().sum(dim=1).to(torch.float64)
    lost = ~torch.isfinite(found) | (found < _UNDERFLOW)
    if not exact and bool(lost.any()):
        found[lost] = y[lost].to(torch.float64).square().sum(dim=1)
    return found


def energy(x: Tensor) -> float:
    """Return Σx² of a whole tensor."""
    return sum(float(squares(piece.unsqueeze(0))) for piece in torch.split(x.reshape(-1), _PIECE))


def squared_distance(x: Tensor, y: Tensor) -> float:
    """Return Σ(x − y)² of two tensors of one shape, in float64, without a copy of the whole."""
    pieces = (torch.split(z.reshape(-1), _PIECE) for z in (x, y))
    return sum(
        float((a.to(torch.float64) - b.to(torch.float64)).square().sum())
        for a, b in zip(*pieces, strict=True)
    )


def rank(moment: Tensor) -> int:
    """Return the rank of a moment above the noise of float32 products."""
    return int(torch.linalg.matrix_rank(moment.to(torch.float64), rtol=1e-6, hermitian=True))


def spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value, or for large matrices an upper bound.

    The bound is √(‖A‖₁‖A‖∞) or ‖A‖_F, whichever is smaller.
    """
    if min(matrix.shape) <= _LARGE:
        return float(torch.linalg.matrix_norm(matrix.to(torch.float64), ord=2))
    sizes = [matrix.abs().sum(dim=dim, dtype=torch.float64).max() for dim in (0, 1)]
    return min(math.sqrt(float(sizes[0] * sizes[1])), frobenius_norm(matrix))


def frobenius_norm(matrix: Tensor) -> float:
    """Return the root of the sum of squares, in float64, without a copy of the whole."""
    lines = torch.split(matrix.reshape(-1, matrix.shape[-1]), 1024)
    return math.sqrt(sum(float(some.to(torch.float64).square().sum()) for some in lines))


def inverses(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses of symmetric matrices, and which of them were positive definite.

    The inverses of the others are meaningless.
    """
    factor, info = torch.linalg.cholesky_ex(grams)
    if bool(info.any()):  # an identity takes the place of each failed factor
        eye = torch.eye(grams.shape[-1]).to(factor)
        factor = torch.where((info == 0)[:, None, None], factor, eye)
    inverse = torch.cholesky_inverse(factor)
    return inverse, (info == 0) & torch.isfinite(inverse).all(dim=-1).all(dim=-1)


def solve_blocks(block: Tensor, target: Tensor) -> Tensor:
    """Solve B x = t for a batch of symmetric blocks; singular ones by the minimum norm."""
    factor, info = torch.linalg.cholesky_ex(block)
    solved = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    for row in info.nonzero().flatten().tolist():
        solved[row] = torch.linalg.pinv(block[row], hermitian=True) @ target[row]
    return solved


def equilibrate(moment: Tensor, ridge: float) -> Tensor:
    """Scale a moment (d, d) to a diagonal of 1 + ridge, in place, and return the scale √Ψ_qq.

    The scale is at least a thousandth of the mean. The energy of a nearly dead column is then below
    the ridge, so no solver gives it an enormous weight.
    """
    energy = moment.diagonal().clamp_min(0.0).clone()
    floor = max(1e-6 * float(energy.mean()), torch.finfo(moment.dtype).tiny)
    scale = energy.clamp_min(floor).sqrt()
    moment.div_(scale).div_(scale.unsqueeze(1))
    moment.diagonal().copy_(energy / scale.square() + ridge)
    return scale


def ridge_inverse(gram: Tensor, penalty: float, *, overwrite: bool = False) -> Tensor:
    """Return (G + ρI)⁻¹ in G's precision.

    Args:
        gram: G, (d, d) or (groups, d, d).
        penalty: ρ.
        overwrite: reuse G's memory for the result.
    """
    out = gram if overwrite else gram.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(penalty)
    if gram.dim() == 3 and len(gram) != 1:
        factor, info = torch.linalg.cholesky_ex(out)
        _check_definite(int(info.max()) if len(info) else 0, gram.shape[-1])
        return torch.cholesky_inverse(factor)
    matrix = _factor_in_place(out.view(out.shape[-2:]))
    torch.cholesky_inverse(matrix, out=matrix)
    return out


def try_ridge_inverse(gram: Tensor, penalty: float) -> Tensor | None:
    """Return (G + ρI)⁻¹, or None where rounding has made it indefinite; G is overwritten."""
    try:
        inverse = ridge_inverse(gram, penalty, overwrite=True)
    except ProblemError:
        return None
    return inverse if bool(torch.isfinite(inverse).all()) else None


def ridge_solve_in_place(gram: Tensor, right: Tensor) -> Tensor:
    """Return R G⁻¹ for a positive definite G, which is overwritten."""
    factor = _factor_in_place(gram)
    return torch.cat(
        [torch.cholesky_solve(rows.mT, factor).mT for rows in torch.split(right, 1024)]
    )


def upper_factor_of_inverse(gram: Tensor, penalty: float) -> Tensor:
    """Return the upper Cholesky factor U of (G + ρI)⁻¹ = UᵀU, in G's memory."""
    inverse = ridge_inverse(gram, penalty, overwrite=True)
    return _factor_in_place(inverse).mT


def _factor_in_place(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor in the matrix's own memory."""
    # LAPACK works on columns; a symmetric matrix is its own transpose.
    columns, info = matrix.mT, torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    _check_definite(int(info), len(matrix))
    return columns


def _check_definite(info: int, columns: int) -> None:
    """Raise where a factorisation reports a failure."""
    if info:
        raise ProblemError(
            f"a moment of {columns} columns is not positive definite from column {info} on. "
            "Use more data, or damping."
        )


def ridge_solve(moment: Tensor, right: Tensor, penalty: float) -> Tensor:
    """Return R (M + λI)⁻¹ in float64.

    Args:
        moment: M.
        right: R.
        penalty: λ.
    """
    m = moment.to(torch.float64)
    damped = m + penalty * torch.eye(len(m), dtype=m.dtype, device=m.device)
    return torch.cholesky_solve(right.mT, torch.linalg.cholesky(damped)).mT


def unexplained(gram: Tensor, support: Tensor) -> Tensor:
    """Return the share of each column's energy that the support's other columns cannot explain.

    It is at least 1e-7.
    """
    lines = gram.index_select(0, support)
    factor, info = torch.linalg.cholesky_ex(lines.index_select(1, support))
    if int(info) != 0:  # rounding to float32 can make a nearly singular matrix indefinite
        lines = lines.double()
        for ridge in _RIDGES:
            square = lines.index_select(1, support)
            square.diagonal().add_(ridge)
            factor, info = torch.linalg.cholesky_ex(square)
            if int(info) == 0:
                break
    inverse = torch.cholesky_inverse(factor)
    share = gram.diagonal() - (lines * (inverse @ lines)).sum(dim=0)
    share[support] = 1 / inverse.diagonal()
    return share.clamp_min(1e-7)


@dataclass(frozen=True)
class Eliminated:
    """A batch of least-squares problems whose variables F were eliminated at their best values.

    Holds the Cholesky factor L of G_FF and Y = L⁻¹[G_FU c_F], for the other variables U and linear
    terms c. Only the lower triangle of `factor` is defined.
    """

    factor: Tensor
    y: Tensor

    @classmethod
    def from_lines(cls, lines: Tensor) -> Eliminated | None:
        """Eliminate F from G_FF over [G_FU c_F]ᵀ, (rows, f + u + 1, f), which is overwritten.

        Returns None where float32 cannot represent a G_FF. Works on panels of columns, so that
        nearly all of it is matrix products. LAPACK takes up to half as long again at this size.
        """
        f = lines.shape[2]
        eye = torch.eye(_PANEL, dtype=lines.dtype, device=lines.device).expand(len(lines), -1, -1)
        held = torch.ones(len(lines), dtype=torch.bool, device=lines.device)
        for low in range(0, f, _PANEL):
            high = min(low + _PANEL, f)
            panel, width = lines[:, low:, low:high], high - low
            if low:
                panel.baddbmm_(lines[:, low:, :low], lines[:, low:high, :low].mT, alpha=-1)
            corner, info = torch.linalg.cholesky_ex(panel[:, :width])
            held &= info == 0
            inverse = torch.linalg.solve_triangular(corner, eye[:, :width, :width], upper=False)
            panel[:, width:] = panel[:, width:] @ inverse.mT
            panel[:, :width] = corner
        if not bool(held.all()):
            if lines.dtype == torch.float64:
                raise ProblemError(
                    "a row's own part of a moment is not positive definite. "
                    "Use more data, or damping."
                )
            return None
        return cls(lines[:, :f], lines[:, f:].mT)

    @property
    def explained(self) -> Tensor:
        """What F explains of the other variables: [G_UF c_F]ᵀ G_FF⁻¹ [G_FU c_F]."""
        return self.y.mT @ self.y

    def values(self, others: Tensor) -> Tensor:
        """Return the best values of F, (rows, f), given those of the other variables."""
        right = self.y[:, :, -1:] - self.y[:, :, :-1] @ others.to(self.y).unsqueeze(2)
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, right, upper=True)
        return solved.squeeze(2)


def inverse_on_supports(gram: Tensor, kept: Tensor) -> Tensor:
    """Invert G_SS for every row of column indices S, (rows, support) → (rows, support, support)."""
    factor = torch.linalg.cholesky(gram[kept.unsqueeze(2), kept.unsqueeze(1)])
    return torch.cholesky_inverse(factor)


def block_costs(blocks: Tensor, weight: Tensor) -> Tensor:
    """Return the cost of removing each block: w_B [A_BB]⁻¹ w_Bᵀ summed over rows.

    `blocks` are (…, k, k) and `weight` is (…, rows, k).
    """
    return solve_lower(blocks, weight.mT).square().sum(dim=(-2, -1))


def solve_lower(matrix: Tensor, right: Tensor) -> Tensor:
    """Return L⁻¹R for the Cholesky factor L of a positive definite matrix."""
    solved: Tensor = torch.linalg.solve_triangular(
        torch.linalg.cholesky(matrix), right, upper=False
    )
    return solved


def substitute(matrix: Tensor, right: Tensor) -> Tensor:
    """Return L⁻¹r for the lower triangles L of matrices (…, n, n) and vectors r (…, n)."""
    solved: Tensor = torch.linalg.solve_triangular(matrix, right.unsqueeze(-1), upper=False)
    return solved.squeeze(-1)


def spd_solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Factorise a symmetric positive definite M once; return the map from B to B M⁻¹."""
    factor = torch.linalg.cholesky(matrix)
    return lambda right: torch.cholesky_solve(right.mT, factor).mT


def woodbury_inverse(samples: Tensor, alpha: float) -> Tensor:
    """Invert Ψ by the paper's recursion: A ← A − (A y yᵀ A)/(n + yᵀ A y), from A = αI.

    The result is (Ψ + I/α)⁻¹. `lobs.solvers.metric.metric` with λ = 1/α gives the same matrix at a
    fraction of the cost; this one is kept to check that.
    """
    n, d = samples.shape
    a = torch.eye(d, dtype=torch.float64, device=samples.device) * alpha
    for y in samples.to(torch.float64):
        ay = a @ y
        a = a - torch.outer(ay, ay) / (n + y @ ay)
    return a


def is_narrow(groups: int, rows: int, columns: int) -> bool:
    """Return whether a layer's groups are so many and so narrow that they are solved together.

    Args:
        groups: number of groups.
        rows: rows of each.
        columns: columns of each.
    """
    return groups >= MANY and columns <= _NARROW and groups * rows * columns**2 <= _MOST
