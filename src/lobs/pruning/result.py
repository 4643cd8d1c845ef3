"""The result of `prune`: the network, its masks, a row per layer, a certificate."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lobs.calibration.batch_norm import BatchNormEffect
from lobs.certificate.bound import Certificate, refuse
from lobs.errors import FileError
from lobs.pruning.feasibility import Coverage
from lobs.pruning.preview import BudgetPreview
from lobs.solvers.scores import Histogram
from lobs.solvers.solution import Solution
from lobs.storage import checkpoint
from lobs.storage.outputs import ONNX, PAGE, PROGRAM, SAFETENSORS, output_path

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lobs.deploy.accelerate import Acceleration
    from lobs.deploy.export import OnnxFile
    from lobs.storage.compact import CompactFile


@dataclass(frozen=True)
class LayerResult:
    """One layer's row of the result.

    `error` is E. `relative_error` is √E over the norm of the dense output. `parameters` names the
    layer's tensors in the state dict, each with its first row and the row after its last.
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
    """Everything known about a pruning, without its tensors.

    `preview` shows the layers under other budgets, where one budget was shared among them.
    """

    layers: tuple[LayerResult, ...]
    certificate: Certificate
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    batch_norm: BatchNormEffect | None = None
    preview: BudgetPreview | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    peak_bytes: int | None = None  # largest resident memory of the process
    coverage: Coverage | None = None  # how much of the network could be pruned, and what was left

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kept {self.kept:,} of {self.total:,} weights, "
            f"{len(self.layers)} layers, {self.seconds:.1f} s)"
        )

    @property
    def kept(self) -> int:
        """Weights kept in the layers that were pruned."""
        return sum(layer.kept for layer in self.layers)

    @property
    def total(self) -> int:
        """Weights of those layers before pruning."""
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
        """Return the result without tensors, ready for JSON."""
        rows = [{**asdict(layer), "kept_fraction": layer.kept_fraction} for layer in self.layers]
        return {
            "kept": self.kept,
            "total": self.total,
            "kept_fraction": self.kept_fraction,
            "layers": rows,
            "certificate": self.certificate.record(),
            "batch_norm": None if self.batch_norm is None else asdict(self.batch_norm),
            "settings": self.settings,
            "seconds": self.seconds,
            "phases": self.phases,
            "peak_bytes": self.peak_bytes,
            "coverage": None if self.coverage is None else asdict(self.coverage),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "the file") -> PruningRecord:
        """Read the record of a file that `PruningResult.save` wrote.

        If the weights have changed since, certificate and preview no longer hold and are left out.

        Args:
            record: `Checkpoint.record` of the file.
            where: the file's name, for error messages.
        """
        if "layers" not in record:
            raise FileError(
                f"{where} has no record of a pruning by layer: give a file that `lobs prune` or "
                "`PruningResult.save` wrote."
            )
        since = changed_since(record)
        try:
            rows, norms = record["layers"], record.get("batch_norm")
            covered = record.get("coverage")
            preview = None if since else record.get("preview")
            certificate = Certificate.from_record(record["certificate"])
            settings = dict(record.get("settings", {}))
            if since:
                certificate = refuse(f"{since} after pruning; lobs.certify measures again")
                settings["since then"] = f"{since}; layer errors are those right after pruning"
            return PruningRecord(
                layers=tuple(_layer(row) for row in rows),
                certificate=certificate,
                settings=settings,
                seconds=float(record.get("seconds", 0.0)),
                batch_norm=None if norms is None else BatchNormEffect(**norms),
                preview=None if preview is None else BudgetPreview.from_record(preview),
                phases=dict(record.get("phases", {})),
                peak_bytes=record.get("peak_bytes"),
                coverage=None if covered is None else Coverage(**covered),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"{where} has a damaged record of a pruning: {error!r}. Write the file again."
            ) from error


def changed_since(record: Mapping[str, Any]) -> str:
    """Return what changed the weights after their errors were recorded, or an empty string."""
    if "retraining" in record:
        return "the network was retrained"
    return f"values were rounded to {record['values']}" if "values" in record else ""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PruningResult(PruningRecord):
    """A pruned network and everything known about it.

    `masks` has, by parameter name, True where a weight was kept. `solutions` has each layer's
    solution with its error curve. After a joint refit it has the refitted weights, and errors are
    distances measured in the network. With a memory limit it has numbers only.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    solutions: dict[str, Solution]

    def summary(self) -> str:
        """Return plain text: the gain, a table of layers, the change of the output."""
        from lobs.pruning.summary import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        from lobs.pruning.summary import html_table

        return html_table(self)

    def save(self, path: str | os.PathLike[str], network: str | None = None, **extra: Any) -> Path:
        """Write weights, masks and the record to a safetensors file; return its path.

        Args:
            path: the file to write.
            network: where the network's code is, such as "mycode:network": a function that takes
                no arguments and returns (model, batches) or (model, batches, evaluate). With it
                the shell can evaluate, bench and export the file.
            **extra: more entries of the record; anything that JSON can hold.
        """
        more = dict(extra) if network is None else {"network": _checked_network(network), **extra}
        preview = {} if self.preview is None else {"preview": asdict(self.preview)}
        return checkpoint.save(self.model, path, self.masks, {**self.record(), **preview, **more})

    def export(
        self, path: str | os.PathLike[str], example: Any = None, **options: Any
    ) -> OnnxFile | ExportedProgram | CompactFile:
        """Write the network for other programs, in the format of the path's extension.

        `.onnx` is an ONNX file and `.pt2` a `torch.export` program; both need `example`.
        `.safetensors` is a compact file without the zeros, which `lobs.load` reads.

        Args:
            path: the file to write.
            example: a batch, as for `lobs.export_onnx`.
            **options: passed on to `lobs.export_onnx`, `lobs.deploy.export_program` or
                `lobs.storage.save_compact`.
        """
        extension = Path(path).suffix.lower()
        if extension not in (ONNX, PROGRAM, SAFETENSORS):
            raise FileError(
                f"'{path}' must end in {ONNX}, {PROGRAM} or {SAFETENSORS}, which name the format."
            )
        if extension == SAFETENSORS:
            write_file = partial(checkpoint.save_compact, self.model, path, self.masks, **options)
            file, limit = write_file(record=self.record()), self.settings.get("file bytes")
            if limit is None or file.file_bytes <= limit:
                return file
            return write_file(record=_short(self.record()))
        if example is None:
            line = f"result.export({os.fspath(path)!r}, example)"
            raise FileError(f"'{path}' needs a batch to follow the network with: write {line}.")
        from lobs.deploy.export import export_onnx, export_program

        write = export_onnx if extension == ONNX else export_program
        return write(self.model, path, example, **options)

    def accelerate(self, example: Any, **options: Any) -> Acceleration:
        """Return a copy with every layer in its fastest implementation for a batch like `example`.

        Args:
            example: a batch, as for `lobs.accelerate`.
            **options: passed on to `lobs.accelerate`.
        """
        from lobs.deploy.accelerate import accelerate

        return accelerate(self.model, example, **options)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        dense: nn.Module | None = None,
        example: Any = None,
        error_before: float | None = None,
        error_after: float | None = None,
        title: str = "Pruned network",
    ) -> Path:
        """Write a web page about the result, readable without a network; return its path.

        Args:
            path: the file to write; it must end in `.html`.
            dense: the network before pruning, for pictures of its weights.
            example: a batch of inputs, for pictures.
            error_before: the dense network's test error in per cent, if known.
            error_after: the pruned network's.
            title: the page's heading.
        """
        from lobs.report import Run, write_report

        target = output_path(path, PAGE)
        asked = self.settings.get("target", "keep=…")
        run = Run(
            label="pruned",
            pruning=self,
            error_before=error_before,
            error_after=error_after,
            dense=dense,
            example=example,
        )
        command = f"lobs.prune(model, batches, lobs.{asked})"
        return write_report(path=target, runs=[run], title=title, command=command)


def _checked_network(network: str) -> str:
    """Return the name of a network's code; refuse what cannot be one."""
    named = isinstance(network, str) and re.fullmatch(r"[\w.-]+(:\w+)?", network)
    if not named or any(not part for part in network.partition(":")[0].split(".")):
        raise FileError(
            f"network is {network!r}: name the function that makes it, such as 'mycode:network'."
        )
    return network


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without what is long and no promise: curves, times, lists of blocks."""
    rows = [{**row, "sensitivity": None} for row in record["layers"]]
    settings = {
        k: v for k, v in record["settings"].items() if k not in ("blocks", "trials", "refit")
    }
    return {**record, "layers": rows, "settings": settings, "phases": {}, "coverage": None}


def _layer(row: Mapping[str, Any]) -> LayerResult:
    """Read one row of a record."""
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
