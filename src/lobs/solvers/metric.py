"""Prepare a layer's moment for solving: equilibrate, damp where necessary, invert.

All of it is done in float64 on the *equilibrated* moment C = S⁻¹(Ψ + λI)S⁻¹ with
S = diag(√(Ψ_qq + λ)). That is the same problem in other units (weights w·s). Losses do not change,
but a nearly dead column or a moment of size 1e30 no longer decides the precision of the others.
`1/[C⁻¹]_qq` is the share of column q's energy that the other columns cannot explain. It measures
how close to singular Ψ is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lobs.errors import ProblemError, caution, note_layer
from lobs.solvers import linalg

# A column with a smaller independent share is noise: moments are sums of float32 products.
_LEAST_INDEPENDENT = 1e-7
# Trial dampings, relative to the mean energy. Collinear but nearly dead columns (an image's border)
# need the first; a moment of few samples needs more.
_LADDER = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
# Samples per column from which Ψ is used undamped. With fewer, its weak directions are accidents of
# the sample, and weights fitted to them fail on new data. The damping is a share of the mean
# energy. All three constants come from benchmarks/few_samples.py.
_ENOUGH = 10
_FOR_ONE_A_COLUMN, _FOR_HARDLY_ANY = 0.03, 0.3


@dataclass(frozen=True)
class Metric:
    """One moment prepared for solving.

    Args:
        gram: the equilibrated moment.
        scale: the factor of each column.
        damping: λ, in Ψ's units.
        least: lower bound of `independence`, where the inverse is not worth its memory.
        known_inverse: the inverse of `gram`, where it is kept.
    """

    gram: Tensor
    scale: Tensor
    damping: float
    least: float | None = None
    known_inverse: Tensor | None = field(default=None, repr=False)

    @property
    def inverse(self) -> Tensor:
        """The inverse of `gram`, computed anew where it is not kept."""
        if self.known_inverse is None:
            return linalg.ridge_inverse(self.gram, 0.0)
        return self.known_inverse

    @property
    def independence(self) -> float:
        """Smallest share of any column's energy that the others cannot explain, in [0, 1]."""
        return 1.0 / float(self.inverse.diagonal().max()) if self.least is None else self.least

    @property
    def sound(self) -> bool:
        """Whether every column is independent above rounding noise."""
        return self.independence >= _LEAST_INDEPENDENT

    def scaled(self, weight: Tensor) -> Tensor:
        """Return weights in equilibrated units and the precision of `gram`."""
        return weight.to(self.gram.dtype) * self.scale

    def unscaled(self, scaled: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        """Return weights in the layer's own units.

        Kept weights on dead inputs, which have no scale, and rows that lost nothing stay unchanged.

        Args:
            scaled: the new weights in equilibrated units.
            weight: the weights before.
            mask: True where a weight is kept.
        """
        dead = self.scale == 0
        same = dead | mask.all(dim=-1, keepdim=True)
        restored = scaled / torch.where(dead, 1.0, self.scale)
        out = torch.where(same, weight.to(self.gram.dtype), restored)
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

    Takes d³ flops and three d×d float64 matrices. A dead column (Ψ_qq = 0) needs no damping: it
    gets scale 0, so its removal costs nothing.

    Args:
        moment: Ψ, (d, d).
        damping: λ in Ψ's units. None means 0 where Ψ is well-determined and has enough samples.
            With few samples and no `first`, it means `few_samples` × the mean energy of all but
            the `protected` columns. Where Ψ is still singular, it means the smallest of
            (1e-9, 1e-6, 1e-5, …) × mean(diag Ψ) that suffices, and at least `first`. The last case,
            and fewer samples than columns, raise a `NumericalWarning`.
        first: smallest damping where damping is necessary.
        protected: trailing columns that hold the constant 1 of a bias.
        name: the layer's name in messages.
        samples: number of samples in Ψ; None if unknown.
    """
    return metrics(
        moment.unsqueeze(0), damping, first=first, protected=protected, name=name, samples=samples
    )[0]


def metrics(
    moments: Tensor,
    damping: float | None = None,
    *,
    first: float = 0.0,
    least: float = 0.0,
    protected: int = 0,
    name: str = "layer",
    samples: int | None = None,
) -> list[Metric]:
    """Return `metric` of every group, with one warning for all groups that were regularised.

    See `metric` for the parameters; `moments` is (groups, d, d). `least` is a damping that is added
    at least, unless `damping` or `first` is given.
    """
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
    # With `first` given, damping starts there: the published method is damped as published.
    share = 0.0 if first else few_samples(psi.shape[-1], samples)
    start = (share * own_energy(psi, protected)).clamp_min(0.0 if first else least).tolist()
    found = _try(psi, start)
    few = samples is not None and samples < psi.shape[-1]
    chosen, regularised = [], []
    for g, tried in enumerate(found):
        sound = tried if tried is not None and tried.sound else None
        chosen.append(sound or _climb(psi[g], max(first, start[g]), name))
        if chosen[g].damping > 0 and (few or sound is None):
            regularised.append(g)
    if regularised:
        worst = max(regularised, key=lambda g: chosen[g].damping)
        where = f" in {len(regularised)} of {len(psi)} groups" if len(psi) > 1 else ""
        _note(psi[worst], chosen[worst].damping, name, samples, where)
    return chosen


def few_samples(columns: int, samples: int | None) -> float:
    """Return the damping for few samples, as a share of the mean energy.

    It is 0 from ten samples per column on, or if their number is unknown.
    """
    if samples is None or samples >= _ENOUGH * columns:
        return 0.0
    return min(_FOR_HARDLY_ANY, _FOR_ONE_A_COLUMN * columns / max(1, samples))


def own_energy(moment: Tensor, protected: int) -> Tensor:
    """Return the mean energy of the inputs, without the constant 1 of a bias."""
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
    """Return the metric with the least damping on the ladder that makes Ψ well-determined."""
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
    """Return every group's metric with its damping; None where Ψ + λI is indefinite."""
    # A dead column costs nothing to remove, whatever the damping of the others.
    energy = psi.diagonal(dim1=-2, dim2=-1)
    energy = torch.where(energy == 0, 0.0, energy + energy.new_tensor(damping).unsqueeze(-1))
    scale = energy.clamp_min(0.0).sqrt()
    divisor = torch.where(scale == 0, 1.0, scale)
    gram = psi / divisor.unsqueeze(-2) / divisor.unsqueeze(-1)
    gram.diagonal(dim1=-2, dim2=-1).copy_(torch.ones_like(energy))
    inverse, good = linalg.inverses(gram)
    each = zip(gram, inverse, scale, damping, good.tolist(), strict=True)
    return [Metric(g, s, lam, known_inverse=a) if ok else None for g, a, s, lam, ok in each]


def _note(psi: Tensor, damping: float, name: str, samples: int | None, where: str) -> None:
    """Note that a layer's moment was regularised."""
    d = len(psi)
    # The rank is only for the message: not worth an eigendecomposition of a large matrix.
    rank = linalg.rank(psi) if d <= 1024 else None
    known = f"{d} columns" if rank is None else f"rank {rank} of {d}"
    seen = "" if samples is None else f"; {samples} samples"
    if samples is not None and samples < d:
        kind, detail = "few samples", f"{samples} samples for {d} inputs"
        advice = "With so few samples the layer's error says little about new data: use more."
    else:
        kind = "regularised"
        idle = f"some of {d}" if rank is None or rank == d else f"{d - rank} of {d}"
        detail = f"{idle} inputs are dead or duplicated"
        advice = (
            "Normal where inputs are dead or duplicated; otherwise use more data, or set damping "
            "yourself."
        )
    singular = f"its input moment Ψ is singular{where} ({known}{seen})"
    text = f"{name}: {singular}, so λ = {damping:.2e} was added to the diagonal. {advice}"
    note_layer(kind, name.removeprefix("layer ").strip("'"), detail, text)
