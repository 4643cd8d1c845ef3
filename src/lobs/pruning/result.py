"""What `prune` gives back: the network, its masks, a row per layer, a certificate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lobs.calibration.batch_norm import BatchNormEffect
from lobs.certificate.bound import Certificate, refuse
from lobs.errors import FileError
from lobs.pruning.preview import BudgetPreview
from lobs.solvers.solution import Solution
from lobs.storage import checkpoint


@dataclass(frozen=True)
class Histogram:
    """How many weights have a sensitivity within each step of log₁₀."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int


@dataclass(frozen=True)
class LayerResult:
    """One line of the result. `error` is E, `relative_error` √E over the norm of the dense output.

    `parameters` says which of the state dict's tensors are the layer's, and which of their rows:
    from, up to.
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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PruningRecord:
    """What is known about a pruning, without its tensors: a row per layer, the certificate, settings, the budget preview.

    `preview` says what other budgets would have asked of the layers, where one budget was shared
    out among them.
    """

    layers: tuple[LayerResult, ...]
    certificate: Certificate
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    batch_norm: BatchNormEffect | None = None
    preview: BudgetPreview | None = None
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "the file") -> PruningRecord:
        """Read back what `PruningResult.save` wrote; what no longer holds, because weights have changed since, is left out."""
        if "layers" not in record:
            raise FileError(
                f"{where} holds no record of a pruning by layer; only what `lobs prune` or "
                "`PruningResult.save` wrote does."
            )
        since = changed_since(record)
        try:
            rows, norms, preview = (
                record["layers"],
                record.get("batch_norm"),
                None if since else record.get("preview"),
            )
            certificate = Certificate(**record["certificate"])
            told = (
                {"since then": f"{since}; layer errors are those right after pruning"}
                if since
                else {}
            )
            return PruningRecord(
                layers=tuple(_layer(row) for row in rows),
                certificate=refuse(f"{since} after it was pruned; lobs.certify measures anew")
                if since
                else certificate,
                settings={**record.get("settings", {}), **told},
                seconds=float(record.get("seconds", 0.0)),
                batch_norm=None if norms is None else BatchNormEffect(**norms),
                preview=None if preview is None else BudgetPreview.from_record(preview),
                phases=dict(record.get("phases", {})),
                peak_bytes=record.get("peak_bytes"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"{where} holds no record of a pruning that can be read: {error!r}."
            ) from error


def changed_since(record: Mapping[str, Any]) -> str:
    """What has happened to a network's weights since its errors were recorded; empty where nothing has."""
    if "retraining" in record:
        return "the network was retrained"
    return f"values were rounded to {record['values']}" if "values" in record else ""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PruningResult(PruningRecord):
    """A pruned network and everything known about it.

    `masks` holds, by parameter name, True where a weight was kept. `solutions` holds the solver's
    answer per layer, or what became of it where all weights were moved together in the end: then
    errors are distances measured in the network. Error curve included; where memory was limited
    only its numbers.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    solutions: dict[str, Solution] = field(repr=False)

    def __repr__(self) -> str:
        return f"Pruning\n{self.summary()}"

    def summary(self) -> str:
        """A table for people, in plain text."""
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [
            f"{'layer':<{width}}  {'shape':>16}  {'kept':>17}  {'rel. error':>10}  {'damping':>9}  "
            f"{'seconds':>8}"
        ]
        for x in self.layers:
            shape = "×".join(map(str, x.shape))
            kept = f"{x.kept:,} ({x.kept_fraction:.1%})"
            lines.append(
                f"{x.name:<{width}}  {shape:>16}  {kept:>17}  {x.relative_error:>10.4f}  "
                f"{x.damping:>9.1e}  {x.seconds:>8.2f}"
            )
        lines.append(f"kept {self.kept:,} of {self.total:,} weights ({self.kept_fraction:.2%})")
        lines.append(
            f"{self.certificate} (root mean square over {self.settings.get('samples', '?')} "
            "calibration samples)"
        )
        if self.batch_norm is not None:
            lines.append(str(self.batch_norm))
        if "compensation" in self.settings:
            lines.append(f"compensated {self.settings['compensation']}")
        if "trials" in self.settings:
            tried = sorted(self.settings["trials"], key=lambda trial: -int(trial["kept"]))
            lines.append(
                "trials: "
                + "; ".join(
                    f"{t['kept']:,} kept, score {t['score']:.4g} ({-t['drop']:+.4g})" for t in tried
                )
            )
        if "evaluate" in self.settings:
            lines.append(f"evaluate was {self.settings['evaluate']}")
        if self.phases:
            spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
            peak = (
                ""
                if self.peak_bytes is None
                else f"; at most {self.peak_bytes / 1e6:,.0f} MB of memory"
            )
            lines.append(f"{self.seconds:.1f} seconds ({spent}){peak}")
        empty = [x.name for x in self.layers if x.total and not x.kept]
        if empty:
            names = ", ".join(f"'{name}'" for name in empty)
            lines.append(
                f"nothing is left of {names}: the target may ask too much of a small layer"
            )
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str], **extra: Any) -> Path:
        """Write weights, masks and the record to a safetensors file; `extra` joins the record."""
        preview = {} if self.preview is None else {"preview": asdict(self.preview)}
        return checkpoint.save(path, self.model, self.masks, {**self.record(), **preview, **extra})


def _layer(row: Mapping[str, Any]) -> LayerResult:
    known = {item.name for item in fields(LayerResult)}
    values = {key: value for key, value in row.items() if key in known}
    histogram = values.get("sensitivity")
    spans = {
        name: (int(start), int(stop))
        for name, (start, stop) in values.get("parameters", {}).items()
    }
    more: dict[str, Any] = {"shape": tuple(values["shape"]), "parameters": spans}
    if histogram is not None:
        more["sensitivity"] = Histogram(
            tuple(histogram["edges"]), tuple(histogram["counts"]), histogram["zeros"]
        )
    return LayerResult(**{**values, **more})
