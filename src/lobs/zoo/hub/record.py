"""What stands beside the weights of a pruned folder: a record for programs, a card for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lobs._system.memory import spelled
from lobs.errors import FileError
from lobs.pruning.result import LayerResult
from lobs.pruning.summary import gain, short_table
from lobs.storage.atomic import atomic_write
from lobs.zoo.hub.headers import Names

RECORD, CARD = "lobs.json", "README.md"
FORMAT = "lobs.hub"
_NAMES = {
    "perplexity": "Perplexity",
    "accuracy": "Accuracy",
    "agreement": "Agreement with the dense network",
    "cosine": "Cosine with the dense network",
}


@dataclass(frozen=True)
class HubResult:
    """The result of `lobs.hub.prune`.

    Args:
        out: the folder with the pruned network.
        source: the folder it came from.
        architecture: the network's class.
        layers: one row for each pruned layer.
        dense: names of weights that were left as they are.
        data: where the calibration data come from, with samples, tokens, length and seed.
        settings: target, solver, refit, and whether blocks were read one by one.
        before: metrics of the dense network on held-out samples.
        after: metrics of the pruned network on the same samples.
        notes: what to know about the result, such as too little data.
        seconds: how long it took.
        peak_bytes: largest resident memory of this process.
    """

    out: Path
    source: Path
    architecture: str
    layers: tuple[LayerResult, ...]
    dense: tuple[str, ...]
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_bytes: int | None = None

    @property
    def kept(self) -> int:
        """Weights kept in the pruned layers."""
        return sum(layer.kept for layer in self.layers)

    @property
    def total(self) -> int:
        """Weights of the pruned layers."""
        return sum(layer.total for layer in self.layers)

    def summary(self) -> str:
        """Return the gain, the layers, and a line for everything else that is known."""
        lines = [gain(self.kept, self.total), *short_table(self.layers)]
        if self.dense:
            lines.append(f"Left dense: {', '.join(self.dense)}.")
        lines += [f"{name}: {text}." for name, text in self.measured()]
        lines += [f"Calibration: {described(self.data)}.", *self.notes]
        peak = "" if self.peak_bytes is None else f"; at most {spelled(self.peak_bytes)} of memory"
        return "\n".join([*lines, f"Time: {self.seconds:.1f} seconds{peak}. Wrote '{self.out}'."])

    def measured(self) -> list[tuple[str, str]]:
        """Return every metric by name, dense → pruned."""
        found = []
        for key, name in _NAMES.items():
            if key in self.after:
                now = _number(key, self.after[key])
                was = f"{_number(key, self.before[key])} → " if key in self.before else ""
                found.append((name, f"{was}{now}"))
        return found

    def record(self) -> dict[str, Any]:
        """Return the result without tensors, ready for JSON."""
        rows = [{**asdict(layer), "kept_fraction": layer.kept_fraction} for layer in self.layers]
        return {
            "format": FORMAT,
            "source": str(self.source),
            "architecture": self.architecture,
            "kept": self.kept,
            "total": self.total,
            "layers": rows,
            "dense": list(self.dense),
            "data": dict(self.data),
            "settings": dict(self.settings),
            "before": dict(self.before),
            "after": dict(self.after),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
            "peak_bytes": self.peak_bytes,
        }


def _number(key: str, value: float) -> str:
    if key in ("accuracy", "agreement"):
        return f"{100 * value:.2f} %"
    return f"{value:.4g}" if key == "perplexity" else f"{value:.4f}"


def described(data: Mapping[str, Any]) -> str:
    """Return in words what was drawn from the data."""
    parts = [f"{data.get('samples', 0):,} samples of {data.get('data', 'given batches')}"]
    if data.get("tokens"):
        parts.append(f"{data['tokens']:,} tokens")
    if "length" in data:
        parts.append(f"length {data['length']}")
    if "seed" in data:
        parts.append(f"seed {data['seed']}")
    return ", ".join(parts)


def write_record(result: HubResult, files: Mapping[str, str], names: Names) -> None:
    """Write the record.

    Args:
        result: the result.
        files: the digest of every shard.
        names: names of pruned tensors in the files.
    """
    found = {"files": dict(files), "names": names.same, "parts": names.parts}
    text = json.dumps({**result.record(), **found}, indent=2)
    with atomic_write(result.out / RECORD) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a folder; empty where it has none."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(found, dict) and found.get("format") == FORMAT
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise FileError(f"'{path}' is no record of lobs. Fetch the folder again.") from error
    return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def write_card(result: HubResult, original: str) -> None:
    """Write the model card.

    Args:
        result: the result.
        original: the text of the source's card, whose licence and language are kept.
    """
    lines = ["---", *_kept_entries(original), f"base_model: {_name(result.source)}"]
    lines += ["tags:", "- pruned", "- lobs", "---", ""]
    lines += [f"# {_name(result.source)}, pruned", "", gain(result.kept, result.total), ""]
    lines += ["| | dense → pruned |", "|---|---|"] if result.measured() else []
    lines += [f"| {name} | {text} |" for name, text in result.measured()]
    lines += ["", f"Measured on {_judged(result.data)}.", ""] if result.measured() else []
    lines += [f"- Calibration: {described(result.data)}. No labels, no retraining."]
    lines += [f"- {k}: `{v}`" for k, v in result.settings.items() if isinstance(v, str)]
    lines += [f"- {note}" for note in result.notes]
    lines += ["", "## Load", "", "```python", *_loading(result), "```", ""]
    lines += [f"{_zeros(result)} `lobs verify` checks every count.", ""]
    lines += ["## Layers", "", "| layer | kept | of | relative error |", "|---|---|---|---|"]
    lines += [
        f"| {x.name} | {x.kept:,} | {x.total:,} | {x.relative_error:.4f} |" for x in result.layers
    ]
    with atomic_write(result.out / CARD) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _zeros(result: HubResult) -> str:
    if "experts" in result.settings:
        return "Experts have left the network, so no weight that is left is zero by force."
    return "Removed weights are zeros in tensors of the same names, shapes and types as before."


def _loading(result: HubResult) -> list[str]:
    if result.settings.get("library") == "timm":
        return ["import timm", "", 'model = timm.create_model("local-dir:.", pretrained=True)']
    name = result.architecture
    return [f"from transformers import {name}", "", f'model = {name}.from_pretrained(".")']


def _judged(data: Mapping[str, Any]) -> str:
    return f"{data.get('held_out', 0):,} held-out samples of {data.get('data', 'given batches')}"


def _name(source: Path) -> str:
    return source.resolve().name or "network"


def _kept_entries(card: str) -> list[str]:
    """Return licence and language of a card's front matter, line by line."""
    lines = card.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return []
    front = lines[1 : lines.index("---", 1)]
    return [line for line in front if line.startswith(("license:", "language: "))]
