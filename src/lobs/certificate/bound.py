"""How far can the network's output have moved? The paper's theorem, with its constants corrected, for chains of layers.

Let ε̃ be the root mean square distance between dense and pruned activations over the calibration
samples. Through one layer

    ε̃_k ≤ gain_k · ε̃_{k−1} + √E_k,

then an activation multiplies by its Lipschitz constant (1 for ReLU). With E_k measured on the dense
network's inputs the gain is that of the pruned weights Ŵ; with E_k measured on the pruned network's
inputs, that of the dense W. Frobenius norms (the paper's) and spectral norms are both valid; the
latter are never larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """One step of a chain: what it does to an incoming deviation, and what it adds.

    `error` is √E of a pruned layer in root mean square over network samples; 0 for everything else.
    """

    name: str
    gain: float
    frobenius_gain: float
    error: float = 0.0


@dataclass(frozen=True)
class Certificate:
    """An upper bound on the root mean square change of the network's output over the calibration samples.

    `bound` is None where the theorem has not been proved for the network; `reason` then says why.
    `measured` is the change itself on those samples, None where they could not be run a second
    time; `held_out` is the change on other inputs, of which the theorem says nothing.
    `contributions` are the terms of the spectral bound by layer.
    """

    bound: float | None
    frobenius_bound: float | None
    measured: float | None = None
    contributions: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    held_out: float | None = None
    output_norm: float | None = None  # root mean square norm of the dense output

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
        return f"output moved by at most {self.bound:.4g} (Frobenius {self.frobenius_bound:.4g}); {measured}"


def compose(links: Sequence[Link]) -> Certificate:
    """Fold a chain of links into a certificate.

    >>> compose([Link("fc1", 2.0, 3.0, 0.1), Link("fc2", 5.0, 7.0, 0.2)]).bound
    0.7
    """
    spectral, frobenius, contributions = 0.0, 0.0, dict[str, float]()
    for link in links:
        spectral = link.gain * spectral + link.error
        frobenius = link.frobenius_gain * frobenius + link.error
        contributions = {name: value * link.gain for name, value in contributions.items()}
        if link.error > 0:
            contributions[link.name] = contributions.get(link.name, 0.0) + link.error
    return Certificate(spectral, frobenius, contributions=contributions)


def refuse(reason: str) -> Certificate:
    """A certificate that gives no number, and why."""
    return Certificate(None, None, reason=reason)
