"""A layer's moment made ready for solving: equilibrated, damped where it must be, inverted.

Everything is done in float64 on the *equilibrated* moment C = S⁻¹(Ψ + λI)S⁻¹, S = diag(√(Ψ_qq +
λ)). That is the same problem in other units (weights w·s): losses do not change, but a column that
is nearly dead, or a moment of size 1e30, no longer decides the precision of all the others.
`1/[C⁻¹]_qq` is then the share of column q's energy that the other columns cannot explain, which
makes "singular" a number a person can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lobs.errors import ProblemError, caution
from lobs.solvers import linalg

# A column less than this share independent of the others is noise: moments are sums of float32
# products.
_LEAST_INDEPENDENT = 1e-7
# Columns that are collinear but nearly dead (an image's border) need next to nothing; a moment of
# few samples needs more.
_LADDER = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
# From so many samples a column on Ψ is taken at its word; with fewer, its quiet directions are
# accidents of the samples, and weights fitted to them fail on new data. Both constants by
# benchmarks/few_samples.py.
_ENOUGH = 10
_FOR_ONE_A_COLUMN, _FOR_HARDLY_ANY = 0.03, 0.3


@dataclass(frozen=True)
class Metric:
    """One moment made ready for solving: its equilibrated form, that form's inverse, and how it was helped."""

    gram: Tensor
    scale: Tensor
    damping: float
    least: float | None = (
        # what independence is known to be at least, where the inverse was not worth its memory
        None
    )
    known_inverse: Tensor | None = field(default=None, repr=False)

    @property
    def inverse(self) -> Tensor:
        """The inverse of `gram`, computed anew where it is not kept."""
        return (
            linalg.ridge_inverse(self.gram, 0.0)
            if self.known_inverse is None
            else self.known_inverse
        )

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
        out = torch.where(
            same, weight.to(self.gram.dtype), scaled / torch.where(dead, 1.0, self.scale)
        )
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

    `damping` is λ, in Ψ's own units. With `None`, λ is 0 where Ψ is well-determined and of enough
    `samples`. Where there are few, and no `first`, it is `few_samples` × the mean energy of all but
    `protected` columns. Where Ψ is singular all the same, the smallest of (1e-9, 1e-6, 1e-5, …) ×
    mean(diag Ψ), and not less than `first`, that mends that. That, and fewer samples than columns,
    is announced by a `NumericalWarning`. Dead columns (Ψ_qq = 0) need no damping: they get scale 0,
    so deleting them costs exactly nothing. Costs d³ flops and three d×d float64 matrices.
    """
    return metrics(
        moment.unsqueeze(0), damping, first=first, protected=protected, name=name, samples=samples
    )[0]


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
    if psi.shape[-1] > protected and not bool(own_energy(psi, protected).any()):
        seen = "" if samples is None else f" of {samples} samples"
        caution(
            f"{name}: all inputs{seen} are zero, so that any weight may go. Check the data, and "
            "what earlier layers keep.",
            f"{name} is dead",
        )
    if damping is not None:
        given = _try(psi, [damping] * len(psi))
        return [_given(p, m, damping, name) for p, m in zip(psi, given, strict=True)]
    # Who says where damping starts is not second-guessed: the published method is damped as
    # published.
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
        caution(
            _helped(psi[worst], chosen[worst].damping, name, samples, where), f"{name} is singular"
        )
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
            f"{name}: Ψ + {damping:g}·I is not positive definite. Use damping ≥ {least:.1e}, or "
            "leave it out to have it chosen."
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
    raise ProblemError(
        f"{name}: Ψ is not positive semi-definite: even damping {most:.1e} does not help."
    )


def _try(psi: Tensor, damping: Sequence[float]) -> list[Metric | None]:
    """Every group's metric with its damping; None where Ψ + λI is not positive definite."""
    # A dead column costs nothing to delete, whatever the damping that others need.
    energy = psi.diagonal(dim1=-2, dim2=-1)
    energy = torch.where(energy == 0, 0.0, energy + energy.new_tensor(damping).unsqueeze(-1))
    scale = energy.clamp_min(0.0).sqrt()
    divisor = torch.where(scale == 0, 1.0, scale)
    gram = psi / divisor.unsqueeze(-2) / divisor.unsqueeze(-1)
    gram.diagonal(dim1=-2, dim2=-1).copy_(torch.ones_like(energy))
    inverse, good = linalg.inverses(gram)
    each = zip(gram, inverse, scale, damping, good.tolist(), strict=True)
    return [Metric(g, s, lam, known_inverse=a) if ok else None for g, a, s, lam, ok in each]


def _helped(psi: Tensor, damping: float, name: str, samples: int | None, where: str) -> str:
    d = len(psi)
    # The rank is only for the message: not worth an eigendecomposition of a large matrix.
    known = f"rank {linalg.rank(psi)} of {d}" if d <= 1024 else f"{d} columns"
    seen = "" if samples is None else f"; {samples} samples"
    few = samples is not None and samples < d
    advice = (
        "With so few samples the layer's error says little about new data: use more."
        if few
        else "Normal where inputs are dead or duplicated; otherwise use more data, or set damping yourself."
    )
    singular = f"its input moment Ψ is singular{where} ({known}{seen})"
    return f"{name}: {singular}, so λ = {damping:.2e} was added to the diagonal. {advice}"
