"""Factorisations, least squares on a support, sums of squares: the only file that calls `torch.linalg`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import ProblemError

# Added to a diagonal of ones until it can be factorised.
_RIDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
# Columns that are factorised at a time where the rest can be matrix products.
_PANEL = 32
# Rows and columns from which a singular value decomposition takes minutes.
_LARGE = 1024
# How many numbers are squared at a time, which stay in the cache; below which sum squares have lost
# digits in float32.
_PIECE, _LEAST = 2**20, 1e-30


def squares(lines: Tensor) -> Tensor:
    """Σx² of every row, in float64, from sums in float32 where those can hold it: a tenth of the time, 1e-7 off."""
    exact = lines.dtype == torch.float64
    y = lines if exact else lines.to(torch.float32)
    found = y.square().sum(dim=1).to(torch.float64)
    lost = ~torch.isfinite(found) | (found < _LEAST)
    if not exact and bool(lost.any()):
        found[lost] = y[lost].to(torch.float64).square().sum(dim=1)
    return found


def energy(x: Tensor) -> float:
    """Σx² of all of a tensor."""
    return sum(float(squares(piece.unsqueeze(0))) for piece in torch.split(x.reshape(-1), _PIECE))


def rank(moment: Tensor) -> int:
    """How many independent directions a moment has above the noise of float32 products."""
    return int(torch.linalg.matrix_rank(moment.to(torch.float64), rtol=1e-6, hermitian=True))


def spectral_norm(matrix: Tensor) -> float:
    """Largest singular value; of large matrices a number that is no less: √(‖A‖₁‖A‖∞) or ‖A‖_F, whichever is closer."""
    if min(matrix.shape) <= _LARGE:
        return float(torch.linalg.matrix_norm(matrix.to(torch.float64), ord=2))
    sizes = [matrix.abs().sum(dim=dim, dtype=torch.float64).max() for dim in (0, 1)]
    return min(math.sqrt(float(sizes[0] * sizes[1])), frobenius_norm(matrix))


def frobenius_norm(matrix: Tensor) -> float:
    """Root of the sum of squares, in float64, without a copy of the whole."""
    lines = torch.split(matrix.reshape(-1, matrix.shape[-1]), 1024)
    return math.sqrt(sum(float(some.to(torch.float64).square().sum()) for some in lines))


def inverses(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a batch of symmetric matrices, and say which were positive definite; the inverses of others mean nothing."""
    factor, info = torch.linalg.cholesky_ex(grams)
    if bool(info.any()):  # what is no factor cannot be inverted; its place is kept
        factor = torch.where(
            (info == 0)[:, None, None], factor, torch.eye(grams.shape[-1]).to(factor)
        )
    inverse = torch.cholesky_inverse(factor)
    return inverse, (info == 0) & torch.isfinite(inverse).all(dim=-1).all(dim=-1)


def solve_blocks(block: Tensor, target: Tensor) -> Tensor:
    """Solve B x = t for a batch of symmetric blocks; one that is singular gets its minimum-norm solution."""
    factor, info = torch.linalg.cholesky_ex(block)
    solved = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    for row in info.nonzero().flatten().tolist():
        solved[row] = torch.linalg.pinv(block[row], hermitian=True) @ target[row]
    return solved


def conjugate_gradients(
    gram: Tensor, weight: Tensor, mask: Tensor, start: Tensor, *, steps: int, tolerance: float = 0.0
) -> Tensor:
    """Approach least squares on a support for all rows at once from `start`: one product of rows·d² a step.

    `gram` may carry a leading group dimension. Ends early when every row's gradient has fallen by
    `tolerance`.
    """
    v = torch.where(mask, start, 0.0)
    residual = torch.where(mask, (weight - v) @ gram, 0.0)
    direction = residual
    size = first = residual.square().sum(dim=-1, keepdim=True)
    tiny = torch.finfo(gram.dtype).tiny
    for _ in range(steps):
        if bool((size <= tolerance**2 * first).all()):
            break
        image = torch.where(mask, direction @ gram, 0.0)
        step = size / (direction * image).sum(dim=-1, keepdim=True).clamp_min(tiny)
        v = v + step * direction
        residual = residual - step * image
        size, before = residual.square().sum(dim=-1, keepdim=True), size
        direction = residual + size / before.clamp_min(tiny) * direction
    return v


def equilibrate(moment: Tensor, ridge: float) -> Tensor:
    """Bring a moment (d, d) to a diagonal of 1 + ridge, in place, and return the scale √Ψ_qq.

    Columns that are dead or nearly so have a scale of a thousandth of the mean at least: their own
    energy then counts for less than the ridge, and nobody gives them enormous weights. For matrices
    of which one more copy would not fit.
    """
    energy = moment.diagonal().clamp_min(0.0).clone()
    floor = max(1e-6 * float(energy.mean()), torch.finfo(moment.dtype).tiny)
    scale = energy.clamp_min(floor).sqrt()
    moment.div_(scale).div_(scale.unsqueeze(1))
    moment.diagonal().copy_(energy / scale.square() + ridge)
    return scale


def ridge_inverse(gram: Tensor, penalty: float, *, overwrite: bool = False) -> Tensor:
    """(G + ρI)⁻¹ in G's precision, with a leading group dimension or without; in G's own memory if that may be overwritten."""
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
    """(G + ρI)⁻¹, or None where rounding has made it indefinite; G is lost."""
    try:
        inverse = ridge_inverse(gram, penalty, overwrite=True)
    except ProblemError:
        return None
    return inverse if bool(torch.isfinite(inverse).all()) else None


def ridge_solve_in_place(gram: Tensor, right: Tensor) -> Tensor:
    """R G⁻¹ for a positive definite G, which is lost, row by row."""
    factor = _factor_in_place(gram)
    return torch.cat(
        [torch.cholesky_solve(rows.mT, factor).mT for rows in torch.split(right, 1024)]
    )


def upper_factor_of_inverse(gram: Tensor, penalty: float) -> Tensor:
    """The upper Cholesky factor U of (G + ρI)⁻¹ = UᵀU, in G's own memory."""
    inverse = ridge_inverse(gram, penalty, overwrite=True)
    return _factor_in_place(inverse).mT


def _factor_in_place(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor, in the matrix's own memory: LAPACK wants columns, of which a symmetric matrix has enough."""
    columns, info = matrix.mT, torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    _check_definite(int(info), len(matrix))
    return columns


def _check_definite(info: int, columns: int) -> None:
    """Raise where a factorisation says that it could not go on."""
    if info:
        raise ProblemError(
            f"a moment of {columns} columns is not positive definite from column {info} on. Use "
            "more data, or damping."
        )


def ridge_solve(moment: Tensor, right: Tensor, penalty: float) -> Tensor:
    """R (M + λI)⁻¹ in float64."""
    m = moment.to(torch.float64)
    damped = m + penalty * torch.eye(len(m), dtype=m.dtype, device=m.device)
    return torch.cholesky_solve(right.mT, torch.linalg.cholesky(damped)).mT


def unexplained(gram: Tensor, support: Tensor) -> Tensor:
    """Which share of every column's energy the (other) columns of a support cannot explain; at least 1e-7."""
    lines = gram.index_select(0, support)
    factor, info = torch.linalg.cholesky_ex(lines.index_select(1, support))
    if (
        int(info) != 0
        # rounded to float32 a nearly singular matrix may be none: what it lacks is within the rounding
    ):
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
    """A batch of least-squares problems with the variables F taken out: they take their best values whatever the others do.

    Holds the Cholesky factor L of G_FF (of `factor` only the lower triangle counts) and Y =
    L⁻¹[G_FU c_F], for others U and linear terms c.
    """

    factor: Tensor
    y: Tensor

    @classmethod
    def from_lines(cls, lines: Tensor) -> Eliminated | None:
        """From G_FF over [G_FU c_F]ᵀ, (rows, f + u + 1, f), which is overwritten; None where float32 cannot hold a G_FF.

        Some columns at a time, so that nearly all of the work is matrix products: LAPACK's Cholesky
        and triangular solves take up to half as long again on matrices of this size.
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
                    "a row's own part of a moment is not positive definite. Use more data, or "
                    "damping."
                )
            return None
        return cls(lines[:, :f], lines[:, f:].mT)

    @property
    def explained(self) -> Tensor:
        """What F explains of the others' energies and linear terms: [G_UF c_F]ᵀ G_FF⁻¹ [G_FU c_F]."""
        return self.y.mT @ self.y

    def values(self, others: Tensor) -> Tensor:
        """F's best values, (rows, f), given the others'."""
        right = self.y[:, :, -1:] - self.y[:, :, :-1] @ others.to(self.y).unsqueeze(2)
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, right, upper=True)
        return solved.squeeze(2)


def inverse_on_supports(gram: Tensor, kept: Tensor) -> Tensor:
    """Invert G_SS for every row of column indices S, (rows, support) → (rows, support, support)."""
    factor = torch.linalg.cholesky(gram[kept.unsqueeze(2), kept.unsqueeze(1)])
    return torch.cholesky_inverse(factor)


def block_costs(blocks: Tensor, weight: Tensor) -> Tensor:
    """w_B [A_BB]⁻¹ w_Bᵀ summed over rows, for blocks (…, k, k) and weights (…, rows, k): what removing each block costs."""
    return solve_lower(blocks, weight.mT).square().sum(dim=(-2, -1))


def solve_lower(matrix: Tensor, right: Tensor) -> Tensor:
    """L⁻¹R for the Cholesky factor L of a positive definite matrix; the whole loss of a block is a square in these terms."""
    solved: Tensor = torch.linalg.solve_triangular(
        torch.linalg.cholesky(matrix), right, upper=False
    )
    return solved


def substitute(matrix: Tensor, right: Tensor) -> Tensor:
    """L⁻¹r for a batch of matrices (…, n, n), of which only the lower triangle L counts, and vectors (…, n)."""
    solved: Tensor = torch.linalg.solve_triangular(matrix, right.unsqueeze(-1), upper=False)
    return solved.squeeze(-1)


def spd_solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Factorise a symmetric positive definite M once; the result maps B to B M⁻¹."""
    factor = torch.linalg.cholesky(matrix)
    return lambda right: torch.cholesky_solve(right.mT, factor).mT


def woodbury_inverse(samples: Tensor, alpha: float) -> Tensor:
    """Invert Ψ by the paper's recursion: A ← A − (A y yᵀ A)/(n + yᵀ A y) from A = αI; ends at (Ψ + I/α)⁻¹.

    Kept as the bridge to the paper (`lobs.solvers.metric.metric` with λ = 1/α is the same matrix at
    a fraction of the cost).
    """
    n, d = samples.shape
    a = torch.eye(d, dtype=torch.float64, device=samples.device) * alpha
    for y in samples.to(torch.float64):
        ay = a @ y
        a = a - torch.outer(ay, ay) / (n + y @ ay)
    return a
