"""What `prune` gives back: the network, its masks, a row per layer, a certificate."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lobs import checkpoint
from lobs.batchnorm import BatchNormEffect
from lobs.ledger import Certificate
from lobs.problem import Solution


@dataclass(frozen=True)
class Histogram:
    """How many weights have a sensitivity within each step of log₁₀."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int


@dataclass(frozen=True)
class LayerResult:
    """One line of the result. `error` is E, `relative_error` √E over the norm of the dense output.

    `parameters` says which of the state dict's tensors are the layer's, and which of their rows: from, up to.
    """

    name: str
    shape: tuple[int, ...]
    kept: int
    total: int
    error: float
    relative_error: float
    damping: float
    seconds: float
    samples: int
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    sensitivity: Histogram | None = field(default=None, repr=False)

    @property
    def kept_fraction(self) -> float:
        """Kept weights over all weights of the layer, bias not counted."""
        return self.kept / self.total if self.total else 1.0


@dataclass(frozen=True, eq=False, repr=False)
class Pruning:
    """A pruned network and everything known about it.

    `masks` holds, by parameter name, True where a weight was kept. `solutions` holds the solver's answer per layer, error
    curve included.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[LayerResult, ...]
    certificate: Certificate
    solutions: dict[str, Solution] = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    batch_norm: BatchNormEffect | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    peak_bytes: int | None = None  # the most memory the process ever had resident

    @property
    def kept(self) -> int:
        """Weights left in the layers that were considered."""
        return sum(layer.kept for layer in self.layers)

    @property
    def total(self) -> int:
        """Weights there were."""
        return sum(layer.total for layer in self.layers)

    @property
    def kept_fraction(self) -> float:
        """Kept weights over all weights, bias not counted."""
        return self.kept / self.total if self.total else 1.0

    @property
    def error(self) -> float:
        """E summed over the layers."""
        return sum(layer.error for layer in self.layers)

    def record(self) -> dict[str, Any]:
        """The result without tensors, ready for JSON."""
        rows = [{**asdict(layer), "kept_fraction": layer.kept_fraction} for layer in self.layers]
        return {
            "kept": self.kept,
            "total": self.total,
            "kept_fraction": self.kept_fraction,
            "layers": rows,
            "certificate": asdict(self.certificate),
            "batch_norm": None if self.batch_norm is None else asdict(self.batch_norm),
            "settings": self.settings,
            "seconds": self.seconds,
            "phases": self.phases,
            "peak_bytes": self.peak_bytes,
        }

    def __repr__(self) -> str:
        return f"Pruning\n{self.summary()}"

    def summary(self) -> str:
        """A table for people, in plain text."""
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [f"{'layer':<{width}}  {'shape':>16}  {'kept':>17}  {'rel. error':>10}  {'damping':>9}  {'seconds':>8}"]
        for x in self.layers:
            shape = "×".join(map(str, x.shape))
            kept = f"{x.kept:,} ({x.kept_fraction:.1%})"
            lines.append(
                f"{x.name:<{width}}  {shape:>16}  {kept:>17}  {x.relative_error:>10.4f}  {x.damping:>9.1e}  {x.seconds:>8.2f}"
            )
        lines.append(f"kept {self.kept:,} of {self.total:,} weights ({self.kept_fraction:.2%})")
        lines.append(f"{self.certificate} (root mean square over {self.settings.get('samples', '?')} calibration samples)")
        if self.batch_norm is not None:
            lines.append(str(self.batch_norm))
        if self.phases:
            spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
            peak = "" if self.peak_bytes is None else f"; at most {self.peak_bytes / 1e6:,.0f} MB of memory"
            lines.append(f"{self.seconds:.1f} seconds ({spent}){peak}")
        empty = [x.name for x in self.layers if x.total and not x.kept]
        if empty:
            lines.append(f"nothing is left of {', '.join(empty)}: the target may ask too much of a small layer")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str], **extra: Any) -> Path:
        """Write weights, masks and the record to a safetensors file; `extra` joins the record."""
        return checkpoint.save(path, self.model, self.masks, {**self.record(), **extra})
