"""Check a saved result against itself and, where the dense network and data are at hand, against its promises."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lobs.batchnorm import borrow_statistics
from lobs.calibrate import collect
from lobs.checkpoint import Checkpoint
from lobs.errors import FileError
from lobs.layers import find_layers
from lobs.pipeline import layer_problem

_TOLERANCE = 1e-3  # relative: moments are sums of float32 products, whose order a machine may choose


@dataclass(frozen=True)
class Finding:
    """One check: what, whether it holds, and the numbers."""

    check: str
    holds: bool
    detail: str


def verify_masks(saved: Checkpoint, model: nn.Module | None = None) -> list[Finding]:
    """Masks hold (in the file, or in a model trained further since), and counts are those recorded."""
    state = saved.state_dict if model is None else model.state_dict()
    findings = []
    for name, mask in saved.masks.items():
        if name not in state:
            raise FileError(f"mask '{name}' names no parameter of the network.")
        revived = int((state[name].cpu()[~mask] != 0).sum())
        detail = f"{int((~mask).sum()):,} zeros hold" if revived == 0 else f"{revived:,} removed weights are not zero"
        findings.append(Finding(f"mask {name}", revived == 0, detail))
    for row in _rows(saved):
        # A network that is one bare layer has parameters without a prefix.
        own = {f"{row['name']}.weight", f"{row['name']}.bias"}
        names = [n for n in saved.masks if n in own] or [n for n in saved.masks if n in ("weight", "bias")]
        removed = sum(int((~saved.masks[n]).sum()) for n in names)
        findings.append(
            Finding(
                f"count {row['name']}",
                row["total"] - removed == row["kept"],
                f"kept {row['total'] - removed:,}, recorded {row['kept']:,}",
            )
        )
    return findings


def verify_errors(saved: Checkpoint, dense: nn.Module, pruned: nn.Module, batches: Iterable[Any]) -> list[Finding]:
    """Recompute every layer's error from data and compare it with the record.

    Errors were measured on the inputs that the dense or the pruned network gives its layers; the latter are those of the
    finished network too, because a layer's inputs depend only on layers before it.
    """
    recorded: Mapping[str, float] = {row["name"]: row["error"] for row in _rows(saved)}
    settings = saved.record.get("settings")
    watched = dense
    if isinstance(settings, dict) and settings.get("inputs") == "pruned":
        watched = copy.deepcopy(pruned)
        borrow_statistics(watched, dense)  # errors were measured before batch norms were re-estimated
    calibration = collect(watched, batches, [layer for layer in find_layers(watched) if layer.name in recorded])
    before = {layer.name: layer for layer in find_layers(dense)}
    after = {layer.name: layer for layer in find_layers(pruned)}
    findings = []
    for name, promised in recorded.items():
        problem = layer_problem(before[name], before[name].matrix(), calibration[name])
        error = problem.error_of(after[name].matrix())
        close = abs(error - promised) <= _TOLERANCE * max(error, promised) + 1e-9 * problem.energy
        findings.append(Finding(f"error {name}", close, f"recomputed {error:.6g}, recorded {promised:.6g}"))
    return findings


def _rows(saved: Checkpoint) -> list[dict[str, Any]]:
    """The record's layer table, refused where it is not one: a file may say anything."""
    rows = saved.record.get("layers", [])
    whole = isinstance(rows, list) and all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows)
    if whole:
        whole = all(isinstance(row.get(key), int | float) for row in rows for key in ("kept", "total", "error"))
    if not whole:
        raise FileError("the file's record of layers is damaged.")
    return list(rows)
