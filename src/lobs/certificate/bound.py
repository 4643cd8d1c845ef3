"""Bound how far pruning can have moved the output of a network without loops.

This is the paper's theorem with corrected constants. Let ε̃ be the root mean square distance between
dense and pruned activations over the calibration samples. Through one layer

    ε̃_k ≤ gain_k · ε̃_{k−1} + √E_k.

Deviations add where tensors are added. Where tensors are concatenated their squares add. An
activation multiplies by its Lipschitz constant, which is 1 for ReLU. Where E_k was measured on
the dense network's inputs, the gain is that of the pruned weights Ŵ. Where it was measured on the
pruned network's inputs, the gain is that of the dense W. Frobenius norms (the paper's) and spectral
norms are both valid. Spectral norms are never larger.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lobs.certificate.guarantee import Guarantee


@dataclass(frozen=True)
class Link:
    """Describe one step of a network.

    Attributes:
        name: the step's name.
        gain: largest factor on an incoming deviation, in spectral norm.
        frobenius_gain: the same in Frobenius norm.
        error: √E of a pruned layer, in root mean square over network samples; else 0.
        key: what later steps call this one; its place in the list by default.
        takes: the steps whose outputs come in; by default the step before. None come in where all
            inputs are the same in both networks.
        joined: "sum" adds deviations that come in, "stack" takes the root of their squares' sum,
            as where tensors are concatenated.
        overwrites: steps whose memory this one writes into; they then hold its output.
    """

    name: str
    gain: float
    frobenius_gain: float
    error: float = 0.0
    key: str = ""
    takes: tuple[str, ...] | None = None
    joined: Literal["sum", "stack"] = "sum"
    overwrites: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """Bound the root mean square change of the output over the calibration samples.

    Attributes:
        bound: the bound with spectral norms; None where the theorem does not cover the network.
        frobenius_bound: the bound with Frobenius norms, as in the paper.
        measured: the change itself on these samples; None where they could not be run again.
        contributions: terms of the spectral bound by layer.
        reason: why there is no bound.
        held_out: the change on other inputs, which the theorem does not bound.
        output_norm: root mean square norm of the dense output.
        guarantee: what holds for inputs drawn like the held-out ones.
        certified: share of the calibration samples whose top answer provably stays; None where
            there is no bound, or where the output is not one row of numbers for each sample.
        certified_held_out: the same share of the held-out inputs.
    """

    bound: float | None
    frobenius_bound: float | None
    measured: float | None = None
    contributions: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    held_out: float | None = None
    output_norm: float | None = None
    guarantee: Guarantee | None = None
    certified: float | None = None
    certified_held_out: float | None = None

    @property
    def changes_at_most(self) -> float | None:
        """Return the largest share of answers that change, with 95 % confidence."""
        return None if self.guarantee is None else self.guarantee.changes_at_most

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Certificate:
        """Read what `record` returned."""
        values = {item.name: record[item.name] for item in fields(cls) if item.name in record}
        if values.get("guarantee") is not None:
            values["guarantee"] = Guarantee(**values["guarantee"])
        return cls(**values)

    def record(self) -> dict[str, Any]:
        """Return all values, ready for JSON."""
        return {**asdict(self), "changes_at_most": self.changes_at_most}

    def relative(self, change: float | None) -> float | None:
        """Return a change of the output as a fraction of the dense output's norm."""
        if change is None or not self.output_norm:
            return None
        return change / self.output_norm

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"measured {self.measured:.4g}"
        measured += "" if self.held_out is None else f", on held-out inputs {self.held_out:.4g}"
        if self.bound is None:
            return f"no bound ({self.reason}); {measured}"
        limit = f"{self.bound:.4g} (Frobenius {self.frobenius_bound:.4g})"
        return f"output moved by at most {limit}; {measured}"


@dataclass(frozen=True)
class _Deviation:
    """How far one step's output can have moved, and which layers contribute to it."""

    spectral: float = 0.0
    frobenius: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)

    def after(self, link: Link) -> _Deviation:
        """Return the deviation behind a step."""
        terms = {name: value * link.gain for name, value in self.terms.items()}
        if link.error > 0:
            terms[link.name] = terms.get(link.name, 0.0) + link.error
        return _Deviation(
            link.gain * self.spectral + link.error,
            link.frobenius_gain * self.frobenius + link.error,
            terms,
        )


def compose(links: Sequence[Link]) -> Certificate:
    """Fold the steps of a network, in running order, into a certificate of the last one's output.

    >>> compose([Link("fc1", 2.0, 3.0, 0.1), Link("fc2", 5.0, 7.0, 0.2)]).bound
    0.7
    """
    found: dict[str, _Deviation] = {}
    last = _Deviation()
    for place, link in enumerate(links):
        incoming = [last] if link.takes is None else [found[key] for key in link.takes]
        last = _joined(incoming, link.joined).after(link)
        found[link.key or str(place)] = last
        for key in link.overwrites:
            if found[key].spectral <= last.spectral:
                found[key] = last
    return Certificate(last.spectral, last.frobenius, contributions=dict(last.terms))


def _joined(parts: Sequence[_Deviation], how: Literal["sum", "stack"]) -> _Deviation:
    """Return the deviation of a sum, or of tensors put side by side."""
    if len(parts) == 1:
        return parts[0]
    terms: dict[str, float] = {}
    for part in parts:
        for name, value in part.terms.items():
            terms[name] = terms.get(name, 0.0) + value
    spectral, frobenius = ([getattr(p, norm) for p in parts] for norm in ("spectral", "frobenius"))
    if how == "sum":
        return _Deviation(sum(spectral), sum(frobenius), terms)
    whole = math.hypot(*spectral)
    share = whole / sum(spectral) if sum(spectral) else 1.0
    return _Deviation(whole, math.hypot(*frobenius), {n: v * share for n, v in terms.items()})


def gains(links: Sequence[Link], layers: Collection[str]) -> dict[str, float]:
    """Return factors with which the layers' deviations reach the output; absent ones do not.

    They hold for every sample by itself. Squares that add are counted as sums, which are larger.

    Args:
        links: the steps of the network, in running order.
        layers: names of the layers.
    """
    found: dict[str, dict[str, float]] = {}
    last: dict[str, float] = {}
    for place, link in enumerate(links):
        incoming = [last] if link.takes is None else [found[key] for key in link.takes]
        last = {link.name: 1.0} if link.name in layers else {}
        for name, value in ((n, v) for part in incoming for n, v in part.items() if link.gain):
            last[name] = last.get(name, 0.0) + value * link.gain
        found[link.key or str(place)] = last
        for key in link.overwrites:
            names = found[key].keys() | last.keys()
            found[key] = {n: max(found[key].get(n, 0.0), last.get(n, 0.0)) for n in names}
    return last


def refuse(reason: str) -> Certificate:
    """Return a certificate without a bound, and the reason."""
    return Certificate(None, None, reason=reason)
