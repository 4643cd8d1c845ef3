"""Damped factorisations and least squares on a support: the only file that calls `torch.linalg`.

Everything is done in float64 on the *equilibrated* moment C = S⁻¹(Ψ + λI)S⁻¹, S = diag(√(Ψ_qq + λ)). That is the
same problem in other units (weights w·s): losses do not change, but a column that is nearly dead, or a moment of size
1e30, no longer decides the precision of all the others. `1/[C⁻¹]_qq` is then the share of column q's energy that the
other columns cannot explain, which makes "singular" a number a person can read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lobs.errors import NumericalWarning, ProblemError

# A column less than this share independent of the others is noise: moments are sums of float32 products.
_LEAST_INDEPENDENT = 1e-7
# Rows and columns from which a singular value decomposition takes minutes.
_LARGE = 1024
# Columns that are collinear but nearly dead (an image's border) need next to nothing; a moment of few samples needs more.
_LADDER = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
# From so many samples a column on Ψ is taken at its word; with fewer, its quiet directions are accidents of the samples, and
# weights fitted to them fail on new data. Both constants by benchmarks/few_samples.py.
_ENOUGH = 10
_FOR_ONE_A_COLUMN, _FOR_HARDLY_ANY = 0.03, 0.3


@dataclass(frozen=True)
class Metric:
    """One moment made ready for solving: its equilibrated form, that form's inverse, and how it was helped."""

    gram: Tensor
    scale: Tensor
    damping: float
    least: float | None = None  # what independence is known to be at least, where the inverse was not worth its memory
    known_inverse: Tensor | None = field(default=None, repr=False)

    @property
    def inverse(self) -> Tensor:
        """The inverse of `gram`, computed anew where it is not kept."""
        return ridge_inverse(self.gram, 0.0) if self.known_inverse is None else self.known_inverse

    @property
    def independence(self) -> float:
        """Smallest share of any column's energy that the others cannot explain, between 0 and 1."""
        return 1.0 / float(self.inverse.diagonal().max()) if self.least is None else self.least

    @property
    def sound(self) -> bool:
        """Whether every column says more than rounding noise."""
        return self.independence >= _LEAST_INDEPENDENT

    def scaled(self, weight: Tensor) -> Tensor:
        """Return weights in equilibrated units and the precision of `gram`."""
        return weight.to(self.gram.dtype) * self.scale

    def unscaled(self, scaled: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        """Return to the layer's own units; kept weights on dead inputs, which have no scale, stay as they were."""
        dead = self.scale == 0
        same = dead | mask.all(dim=-1, keepdim=True)  # rows that lost nothing come back to the bit
        out = torch.where(same, weight.to(self.gram.dtype), scaled / torch.where(dead, 1.0, self.scale))
        return torch.where(mask, out, 0.0)


def metric(
    moment: Tensor,
    damping: float | None = None,
    *,
    first: float = 0.0,
    protected: int = 0,
    name: str = "layer",
    samples: int | None = None,
) -> Metric:
    """Equilibrate and invert Ψ + λI.

    `damping` is λ, in Ψ's own units. With `None`, λ is 0 where Ψ is well-determined and of enough `samples`. Where there are
    few, and no `first`, it is `few_samples` × the mean energy of all but `protected` columns. Where Ψ is singular all the same,
    the smallest of (1e-9, 1e-6, 1e-5, …) × mean(diag Ψ), and not less than `first`, that mends that. That, and fewer samples
    than columns, is announced by a `NumericalWarning`. Dead columns (Ψ_qq = 0) need no damping: they get scale 0, so
    deleting them costs exactly nothing. Costs d³ flops and three d×d float64 matrices.
    """
    return metrics(moment.unsqueeze(0), damping, first=first, protected=protected, name=name, samples=samples)[0]


def metrics(
    moments: Tensor,
    damping: float | None = None,
    *,
    first: float = 0.0,
    protected: int = 0,
    name: str = "layer",
    samples: int | None = None,
) -> list[Metric]:
    """`metric` for every group of a layer: all at once where none needs help, and one warning for all that do."""
    psi = moments.to(torch.float64)
    if damping is not None:
        given = _try(psi, [damping] * len(psi))
        return [_given(p, m, damping, name) for p, m in zip(psi, given, strict=True)]
    # Who says where damping starts is not second-guessed: the published method is damped as published.
    share = 0.0 if first else few_samples(psi.shape[-1], samples)
    start = (share * own_energy(psi, protected)).tolist()
    found = _try(psi, start)
    few = samples is not None and samples < psi.shape[-1]
    chosen, helped = [], []
    for g, tried in enumerate(found):
        sound = tried if tried is not None and tried.sound else None
        chosen.append(sound or _climb(psi[g], max(first, start[g]), name))
        if chosen[g].damping > 0 and (few or sound is None):
            helped.append(g)
    if helped:
        worst = max(helped, key=lambda g: chosen[g].damping)
        where = f" in {len(helped)} of {len(psi)} groups" if len(psi) > 1 else ""
        message = _helped(psi[worst], chosen[worst].damping, name, samples, where)
        warnings.warn(message, NumericalWarning, stacklevel=3)
    return chosen


def few_samples(columns: int, samples: int | None) -> float:
    """The share of its energy that a column is damped with where samples are few; 0 from ten a column on, or if unknown."""
    if samples is None or samples >= _ENOUGH * columns:
        return 0.0
    return min(_FOR_HARDLY_ANY, _FOR_ONE_A_COLUMN * columns / max(1, samples))


def own_energy(moment: Tensor, protected: int) -> Tensor:
    """Mean energy of the inputs, without the constant 1 of a bias, whose energy says nothing about theirs."""
    energy = moment.diagonal(dim1=-2, dim2=-1)
    return energy[..., : max(1, energy.shape[-1] - protected)].mean(dim=-1)


def _given(psi: Tensor, found: Metric | None, damping: float, name: str) -> Metric:
    if found is None:
        least = 1e-6 * float(psi.diagonal().mean())
        raise ProblemError(
            f"{name}: Ψ + {damping:g}·I is not positive definite. Use damping ≥ {least:.1e}, or leave it out to have it chosen."
        )
    return found


def _climb(psi: Tensor, first: float, name: str) -> Metric:
    """The least damping on the ladder that makes Ψ well-determined."""
    size = float(psi.diagonal().mean())
    for step in _LADDER:
        (found,) = _try(psi.unsqueeze(0), [max(step * size, first)])
        if found is not None and found.sound:
            return found
    most = max(_LADDER[-1] * size, first)
    raise ProblemError(f"{name}: Ψ is not positive semi-definite: even damping {most:.1e} does not help.")


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

    `gram` may carry a leading group dimension. Ends early when every row's gradient has fallen by `tolerance`.
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

    Columns that are dead or nearly so have a scale of a thousandth of the mean at least: their own energy then counts for less
    than the ridge, and nobody gives them enormous weights. For matrices of which one more copy would not fit.
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
    if gram.dim() == 3 and len(gram) > 1:
        return torch.cholesky_inverse(torch.linalg.cholesky(out))
    matrix = _factor_in_place(out.view(out.shape[-2:]))
    torch.cholesky_inverse(matrix, out=matrix)
    return out


def ridge_solve_in_place(gram: Tensor, right: Tensor) -> Tensor:
    """R G⁻¹ for a positive definite G, which is lost, row by row."""
    factor = _factor_in_place(gram)
    return torch.cat([torch.cholesky_solve(rows.mT, factor).mT for rows in torch.split(right, 1024)])


def upper_factor_of_inverse(gram: Tensor, penalty: float) -> Tensor:
    """The upper Cholesky factor U of (G + ρI)⁻¹ = UᵀU, in G's own memory."""
    inverse = ridge_inverse(gram, penalty, overwrite=True)
    return _factor_in_place(inverse).mT


def _factor_in_place(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor, in the matrix's own memory: LAPACK wants columns, of which a symmetric matrix has enough."""
    columns, info = matrix.mT, torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    if int(info) != 0:
        raise ProblemError(
            f"a moment of {len(matrix)} columns is not positive definite from column {int(info)} on. Use more data, or damping."
        )
    return columns


def ridge_solve(moment: Tensor, right: Tensor, penalty: float) -> Tensor:
    """R (M + λI)⁻¹ in float64."""
    m = moment.to(torch.float64)
    damped = m + penalty * torch.eye(len(m), dtype=m.dtype, device=m.device)
    return torch.cholesky_solve(right.mT, torch.linalg.cholesky(damped)).mT


def unexplained(gram: Tensor, support: Tensor) -> Tensor:
    """Which share of every column's energy the (other) columns of a support cannot explain; at least 1e-7."""
    lines = gram.index_select(0, support)
    factor, info = torch.linalg.cholesky_ex(lines.index_select(1, support))
    if int(info) != 0:
        lines = lines.double()
        factor = torch.linalg.cholesky(lines.index_select(1, support))
    inverse = torch.cholesky_inverse(factor)
    share = gram.diagonal() - (lines * (inverse @ lines)).sum(dim=0)
    share[support] = 1 / inverse.diagonal()
    return share.clamp_min(1e-7)


@dataclass(frozen=True)
class Eliminated:
    """A batch of least-squares problems with the variables F taken out: they take their best values whatever the others do.

    Holds the Cholesky factor L of G_FF and Y = L⁻¹[G_FU c_F], for others U and linear terms c.
    """

    factor: Tensor
    y: Tensor

    @classmethod
    def from_blocks(cls, block: Tensor, cross: Tensor) -> Eliminated:
        """From G_FF (rows, f, f) and [G_FU c_F] (rows, f, u + 1): one Cholesky and one triangular solve a row."""
        factor, info = torch.linalg.cholesky_ex(block)
        if bool(info.any()):  # float32 can lose a nearly singular block that float64 holds
            factor, cross = torch.linalg.cholesky(block.double()), cross.double()
        return cls(factor, torch.linalg.solve_triangular(factor, cross, upper=False))

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
    solved: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), right, upper=False)
    return solved


def spd_solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Factorise a symmetric positive definite M once; the result maps B to B M⁻¹."""
    factor = torch.linalg.cholesky(matrix)
    return lambda right: torch.cholesky_solve(right.mT, factor).mT


def woodbury_inverse(samples: Tensor, alpha: float) -> Tensor:
    """Invert Ψ by the paper's recursion: A ← A − (A y yᵀ A)/(n + yᵀ A y) from A = αI; ends at (Ψ + I/α)⁻¹.

    Kept as the bridge to the paper (`metric` with λ = 1/α is the same matrix at a fraction of the cost).
    """
    n, d = samples.shape
    a = torch.eye(d, dtype=torch.float64, device=samples.device) * alpha
    for y in samples.to(torch.float64):
        ay = a @ y
        a = a - torch.outer(ay, ay) / (n + y @ ay)
    return a


def _try(psi: Tensor, damping: Sequence[float]) -> list[Metric | None]:
    """Every group's metric with its damping; None where Ψ + λI is not positive definite."""
    # A dead column costs nothing to delete, whatever the damping that others need.
    energy = psi.diagonal(dim1=-2, dim2=-1)
    energy = torch.where(energy == 0, 0.0, energy + energy.new_tensor(damping).unsqueeze(-1))
    scale = energy.clamp_min(0.0).sqrt()
    divisor = torch.where(scale == 0, 1.0, scale)
    gram = psi / divisor.unsqueeze(-2) / divisor.unsqueeze(-1)
    gram.diagonal(dim1=-2, dim2=-1).copy_(torch.ones_like(energy))
    factor, info = torch.linalg.cholesky_ex(gram)
    if bool(info.any()):  # what is no factor cannot be inverted; its place is kept
        factor = torch.where((info == 0)[:, None, None], factor, torch.eye(psi.shape[-1]).to(factor))
    inverse = torch.cholesky_inverse(factor)
    good = (info == 0) & torch.isfinite(inverse).all(dim=-1).all(dim=-1)
    each = zip(gram, inverse, scale, damping, good.tolist(), strict=True)
    return [Metric(g, s, lam, known_inverse=a) if ok else None for g, a, s, lam, ok in each]


def _helped(psi: Tensor, damping: float, name: str, samples: int | None, where: str) -> str:
    d = len(psi)
    # The rank is only for the message: not worth an eigendecomposition of a large matrix.
    known = f"rank {rank(psi)} of {d}" if d <= 1024 else f"{d} columns"
    seen = "" if samples is None else f"; {samples} samples"
    few = samples is not None and samples < d
    advice = (
        "With so few samples the layer's error says little about new data: use more."
        if few
        else "Normal where inputs are dead or duplicated; otherwise use more data, or set damping yourself."
    )
    singular = f"its input moment Ψ is singular{where} ({known}{seen})"
    return f"{name}: {singular}, so λ = {damping:.2e} was added to the diagonal. {advice}"
