"""Tables of the page as rows of text: headline, details, settings and environment."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from lobs import __version__
from lobs.pruning.summary import LIMIT_COUNTS
from lobs.report.words import fixed, number, percent, relative, size

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult
    from lobs.report import Run
    from lobs.report.headline import Facts


class Column(NamedTuple):
    """A heading, the numbers to compare (lower is better) and their texts, one per run."""

    heading: str
    values: list[float | None]
    texts: list[str]

    def best(self, index: int) -> bool:
        """Return whether this run's number is the lowest; False where all are equal."""
        known = {value for value in self.values if value is not None and math.isfinite(value)}
        return len(known) > 1 and self.values[index] == min(known)


def differ(runs: Sequence[Run]) -> bool:
    """Return whether the runs are of networks with different layers."""
    return len({tuple((row.name, row.shape) for row in run.pruning.layers) for run in runs}) > 1


def headline(found: Sequence[Facts]) -> list[Column]:
    """Return the first table's columns: weights, file, error and change."""
    runs = [one.run for one in found]
    results = [run.pruning for run in runs]
    kept = [f"{x.kept:,} ({percent(x.kept_fraction)})" for x in results]
    columns = [Column("weights kept", [x.kept_fraction for x in results], kept)]
    if any(one.bytes_after is not None for one in found):
        files = [
            f"{size(one.bytes_before)} → {size(one.bytes_after)}"
            if one.bytes_before is not None and one.bytes_after is not None
            else "–"
            for one in found
        ]
        columns.append(Column("file", [one.bytes_after for one in found], files))
    if any(run.error_before is not None or run.error_after is not None for run in runs):
        columns.append(_tests(runs))
    mistakes = [None if x.mistakes is None else float(x.mistakes) for x in found]
    columns.append(Column("change", mistakes, [one.change() for one in found]))
    return columns


def details(runs: Sequence[Run]) -> list[Column]:
    """Return the columns of the second table: errors, changes of the output, bound and seconds."""
    results = [run.pruning for run in runs]
    found = [x.certificate for x in results]
    columns = [
        Column("layer error Σ E", [x.error for x in results], [number(x.error) for x in results])
    ]
    for heading, values in (
        ("output change", [c.measured for c in found]),
        ("on held-out inputs", [c.held_out for c in found]),
        ("guaranteed bound", [c.bound for c in found]),
    ):
        if any(value is not None for value in values):
            texts = [relative(value, c) for value, c in zip(values, found, strict=True)]
            columns.append(Column(heading, values, texts))
    seconds = [x.seconds for x in results]
    return [*columns, Column("seconds", [*seconds], [fixed(x) for x in seconds])]


def _tests(runs: Sequence[Run]) -> Column:
    """Return the test errors. Runs with different metrics name them and are not compared."""
    texts = [f"{fixed(run.error_before)} → {fixed(run.error_after)}" for run in runs]
    if len({run.metric for run in runs}) == 1:
        metric = runs[0].metric
        sign = 1 if "error" in metric.lower() else -1  # of a score, larger is better
        values = [None if run.error_after is None else sign * run.error_after for run in runs]
        return Column(metric, values, texts)
    return Column(
        "test",
        [None] * len(runs),
        [f"{text} {run.metric}" for text, run in zip(texts, runs, strict=True)],
    )


def side_by_side(runs: Sequence[Run]) -> dict[str, list[LayerResult | None]]:
    """Return, for every layer, each run's result, or None if the run has no such layer."""
    rows = [{layer.name: layer for layer in run.pruning.layers} for run in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return every setting by name: one value if all runs agree, else one per run.

    The trials of a drop search and the refit of blocks are left out; they have other tables.
    """
    tables = {"trials": trials, "blocks": blocks}
    names = dict.fromkeys(
        key
        for run in runs
        for key in run.pruning.settings
        if not (key in tables and tables[key](run))
    )
    rows = {name: [str(run.pruning.settings.get(name, "–")) for run in runs] for name in names}
    return {name: values if len(set(values)) > 1 else values[:1] for name, values in rows.items()}


def trials(run: Run) -> list[list[str]]:
    """Return the trials of a drop search: weights kept, their share, score and drop.

    Without labels the drop is an estimate, and its upper confidence limit follows.
    """
    found = run.pruning.settings.get("trials")
    total = max(1, run.pruning.total)
    try:
        return [
            [
                f"{int(t['kept']):,}",
                percent(int(t["kept"]) / total),
                number(float(t["score"])),
                number(float(t["drop"])),
                *([] if t.get("at_most") is None else [number(float(t["at_most"]))]),
            ]
            for t in (found if isinstance(found, list) else [])
        ]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return []  # a file may hold anything


def trial_heading(rows: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return the headings for the rows of `trials`, and what decides whether a trial passed."""
    plain = ["weights kept", "share", "score"]
    limited = [*plain, "estimated drop", "upper limit of drop"]
    if any(len(row) == len(limited) for row in rows):
        return limited, LIMIT_COUNTS
    return [*plain, "drop"], ""


def blocks(run: Run) -> list[list[str]]:
    """Return the refit of every block: its name, and the error before and after it."""
    found = run.pruning.settings.get("blocks")
    try:
        return [
            [
                str(b["name"]),
                percent(math.sqrt(float(b["before"]))),
                percent(math.sqrt(float(b["after"]))),
                str(b["reason"]) or ("refitted" if int(b["epochs"]) else "left as solved"),
            ]
            for b in (found if isinstance(found, list) else [])
        ]
    except (KeyError, TypeError, ValueError, OverflowError):  # a file may hold anything
        return []


def environment() -> dict[str, str]:
    """Return the versions that the numbers depend on, and nothing about whose machine it was."""
    return {
        "lobs": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }
