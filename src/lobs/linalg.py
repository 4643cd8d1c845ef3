"""Damped factorisations and least squares on a support: the only file that calls `torch.linalg`.

Everything is done in float64 on the *equilibrated* moment C = S⁻¹(Ψ + λI)S⁻¹, S = diag(√(Ψ_qq + λ)). That is the
same problem in other units (weights w·s): losses do not change, but a column that is nearly dead, or a moment of size
1e30, no longer decides the precision of all the others. `1/[C⁻¹]_qq` is then the share of column q's energy that the
other columns cannot explain, which makes "singular" a number a person can read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import NumericalWarning, ProblemError

# A column less than this share independent of the others is noise: moments are sums of float32 products.
_LEAST_INDEPENDENT = 1e-7
# Columns that are collinear but nearly dead (an image's border) need next to nothing; a moment of few samples needs more.
_LADDER = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Metric:
    """One moment made ready for solving: its equilibrated form, that form's inverse, and how it was helped."""

    gram: Tensor
    inverse: Tensor
    scale: Tensor
    damping: float

    @property
    def independence(self) -> float:
        """Smallest share of any column's energy that the others cannot explain, between 0 and 1."""
        return 1.0 / float(self.inverse.diagonal().max())

    def scaled(self, weight: Tensor) -> Tensor:
        """Return weights in equilibrated units, float64."""
        return weight.to(torch.float64) * self.scale

    def unscaled(self, scaled: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        """Return to the layer's own units; kept weights on dead inputs, which have no scale, stay as they were."""
        dead = self.scale == 0
        same = dead | mask.all(dim=-1, keepdim=True)  # rows that lost nothing come back to the bit
        out = torch.where(same, weight.to(torch.float64), scaled / torch.where(dead, 1.0, self.scale))
        return torch.where(mask, out, 0.0)


def metric(
    moment: Tensor,
    damping: float | None = None,
    *,
    first: float = 0.0,
    name: str = "layer",
    samples: int | None = None,
) -> Metric:
    """Equilibrate and invert Ψ + λI.

    `damping` is λ, in Ψ's own units. With `None`, λ is 0 where Ψ is well-determined; otherwise the smallest of
    (1e-9, 1e-6, 1e-5, …) × mean(diag Ψ), and not less than `first`, that makes it so, announced by a `NumericalWarning`. Dead
    columns (Ψ_qq = 0) need no damping: they get scale 0, so deleting them costs exactly nothing. Costs d³ flops and three
    d×d float64 matrices.
    """
    psi = moment.to(torch.float64)
    size = float(psi.diagonal().mean())
    if damping is not None:
        found = _try(psi, float(damping))
        if found is None:
            raise ProblemError(
                f"{name}: Ψ + {damping:g}·I is not positive definite. Use damping ≥ {1e-6 * size:.1e}, or leave it "
                f"out to have it chosen."
            )
        return found
    for step in (0.0, *_LADDER):
        found = _try(psi, max(step * size, first) if step > 0 else 0.0)
        if found is not None and found.independence >= _LEAST_INDEPENDENT:
            if step > 0:
                warnings.warn(_helped(psi, found.damping, name, samples), NumericalWarning, stacklevel=3)
            return found
    raise ProblemError(f"{name}: Ψ is not positive semi-definite: even damping {_LADDER[-1] * size:.1e} does not help.")


def rank(moment: Tensor) -> int:
    """How many independent directions a moment has above the noise of float32 products."""
    return int(torch.linalg.matrix_rank(moment.to(torch.float64), rtol=1e-6, hermitian=True))


def spectral_norm(matrix: Tensor) -> float:
    """Largest singular value."""
    return float(torch.linalg.matrix_norm(matrix.to(torch.float64), ord=2))


def least_squares_on_support(gram: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Minimise (v − w) G (v − w)ᵀ for every row over v that vanish off the mask.

    The normal equations on a support S are G_SS v_S = (w G)_S: one Cholesky solve of |S|³/3 a row, float64. A
    row whose G_SS is singular gets its minimum-norm solution.
    """
    wanted = weight @ gram
    out = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        support = kept.nonzero().squeeze(1)
        block = gram.index_select(0, support).index_select(1, support)
        target = wanted[row, support].unsqueeze(1)
        factor, info = torch.linalg.cholesky_ex(block)
        if int(info) == 0:
            solved = torch.cholesky_solve(target, factor)
        else:
            solved = torch.linalg.pinv(block, hermitian=True) @ target
        out[row, support] = solved.squeeze(1)
    return out


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


def _try(psi: Tensor, damping: float) -> Metric | None:
    # A dead column costs nothing to delete, whatever the damping that others need.
    energy = torch.where(psi.diagonal() == 0, 0.0, psi.diagonal() + damping)
    scale = energy.clamp_min(0.0).sqrt()
    dead = scale == 0
    divisor = torch.where(dead, 1.0, scale)
    gram = psi / divisor / divisor.unsqueeze(1)
    gram.diagonal().copy_(torch.ones_like(energy))
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) != 0:
        return None
    inverse = torch.cholesky_inverse(factor)
    if not bool(torch.isfinite(inverse).all()):
        return None
    return Metric(gram, inverse, scale, damping)


def _helped(psi: Tensor, damping: float, name: str, samples: int | None) -> str:
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
    return f"{name}: its input moment Ψ is singular ({known}{seen}), so λ = {damping:.2e} was added to the diagonal. {advice}"
