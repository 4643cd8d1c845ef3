"""The slider's data: the weights that every stop of a budget preview removes, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lobs.report.figures import COLOURS, CROSS, MARKS
from lobs.report.words import short_names

if TYPE_CHECKING:
    from lobs.report import Run


def slider(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the budget previews of the runs that have one, or None if no run has."""
    known = [(index, run) for index, run in enumerate(runs) if run.pruning.preview is not None]
    if not known:
        return None
    names = list(dict.fromkeys(name for _, run in known for name in _preview(run).totals))
    return {
        "layers": names,
        "labels": short_names(names),
        "cross": CROSS,
        "ring": MARKS[0],
        "runs": [_table(index, run, names) for index, run in known],
    }


def absence(run: Run) -> str:
    """Say why a run has no budget preview."""
    if "since then" in run.pruning.settings:
        return "the network was changed after pruning, so its error curves no longer hold"
    target = str(run.pruning.settings.get("target", ""))
    if (
        target.startswith(("Sparsity", "Budget"))
        and "scope='layer'" not in target
        and "{" not in target.partition(",")[0]
    ):
        return "the file holds no error curves: an earlier version wrote it, or it is compact"
    return (
        "its target speaks of each layer by itself, so no budget was allocated. "
        "One number as target, such as keep=0.07, allocates a budget"
    )


def _preview(run: Run) -> Any:
    return run.pruning.preview


def _table(index: int, run: Run, names: Sequence[str]) -> dict[str, Any]:
    preview, own = _preview(run), run.pruning
    return {
        "label": run.label,
        "colour": COLOURS[index % len(COLOURS)],
        "path": MARKS[index % len(MARKS)],
        "totals": [preview.totals.get(name) for name in names],
        "removed": [preview.removed.get(name) for name in names],
        "errors": [
            [_finite(x) for x in preview.errors[name]] if name in preview.errors else None
            for name in names
        ],
        "change": [_finite(x) for x in preview.change],
        "at": preview.at,
        "measured": _finite(own.certificate.measured),
        "norm": _finite(own.certificate.output_norm),
        "plain": _plain(str(own.settings.get("target", ""))),
    }


def _plain(target: str) -> bool:
    """Return whether one number can ask for another budget."""
    return (
        target.startswith("Sparsity(")
        and "keep_at_least={}" in target
        and "keep_at_most={}" in target
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
