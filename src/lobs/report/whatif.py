"""The slider's data: what every stop of an budget preview asks of the layers, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lobs.report.figures import COLOURS, MARKS, shown
from lobs.report.words import short_names

if TYPE_CHECKING:
    from lobs.report import Run


def slider(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Outlooks of the runs that have one, the first of them leading; None where none has."""
    known = [(index, run) for index, run in enumerate(runs) if run.pruning.preview is not None]
    if not known:
        return None
    names = list(dict.fromkeys(name for _, run in known for name in _outlook(run).totals))
    labels = [shown(name) for name in short_names(names)]
    return {
        "layers": [shown(name) for name in names],
        "labels": labels,
        "runs": [_table(i, run, names) for i, run in known],
    }


def absence(run: Run) -> str:
    """Why a run has no budget preview, in words."""
    if "since then" in run.pruning.settings:
        return "the network was changed after pruning, and the error curves are those of before"
    target = str(run.pruning.settings.get("target", ""))
    if (
        target.startswith(("Sparsity", "Budget"))
        and "scope='layer'" not in target
        and "{" not in target.partition(",")[0]
    ):
        return "it was saved without its error curves: by an earlier version, or in a compact file"
    return "its target speaks of each layer by itself, so no budget was shared out and no error curves were compared"


def _outlook(run: Run) -> Any:
    return run.pruning.preview


def _table(index: int, run: Run, names: Sequence[str]) -> dict[str, Any]:
    preview, own = _outlook(run), run.pruning
    return {
        "label": shown(run.label),
        "colour": COLOURS[index % len(COLOURS)],
        "symbol": MARKS[index % len(MARKS)][0],
        "totals": [preview.totals.get(name) for name in names],
        "removed": [preview.removed.get(name) for name in names],
        "errors": [
            [_finite(x) for x in preview.errors[name]] if name in preview.errors else None
            for name in names
        ],
        "change": [_finite(x) for x in preview.change],
        "at": preview.at,
        "measured": _finite(own.certificate.measured),
        "plain": _plain(str(own.settings.get("target", ""))),
    }


def _plain(target: str) -> bool:
    """Can another budget be asked for by one number?"""
    return (
        target.startswith("Sparsity(")
        and "keep_at_least={}" in target
        and "keep_at_most={}" in target
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
