"""The headline, the settings and the environment, as rows of text."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from lobs import __version__
from lobs.report.words import fixed, number, percent

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult
    from lobs.report import Run


class Column(NamedTuple):
    """A heading, the numbers that are compared (lower is better), and how they read; one per run."""

    heading: str
    values: list[float | None]
    texts: list[str]

    def best(self, index: int) -> bool:
        """Is this run's number the lowest? Not where all are alike."""
        known = {value for value in self.values if value is not None and math.isfinite(value)}
        return len(known) > 1 and self.values[index] == min(known)


def differ(runs: Sequence[Run]) -> bool:
    """Whether the runs are of networks with different layers, which a side-by-side table would hide."""
    return len({tuple((row.name, row.shape) for row in run.pruning.layers) for run in runs}) > 1


def headline(runs: Sequence[Run]) -> list[Column]:
    """What to compare runs by."""
    results = [run.pruning for run in runs]
    kept = [f"{x.kept:,} ({percent(x.kept_fraction)})" for x in results]
    measured, bound = (
        [x.certificate.measured for x in results],
        [x.certificate.bound for x in results],
    )
    held_out = [x.certificate.held_out for x in results]
    errors = [x.error for x in results]
    tested = any(run.error_before is not None or run.error_after is not None for run in runs)
    return [
        Column("weights kept", [x.kept_fraction for x in results], kept),
        *([_tests(runs)] if tested else []),
        Column("layer error Σ E", [*errors], [number(x) for x in errors]),
        Column("measured change", measured, [number(x) for x in measured]),
        *(
            [Column("on held-out inputs", held_out, [number(x) for x in held_out])]
            if any(x is not None for x in held_out)
            else []
        ),
        Column("guaranteed bound", bound, [number(x) for x in bound]),
        Column("seconds", [x.seconds for x in results], [fixed(x.seconds) for x in results]),
    ]


def _tests(runs: Sequence[Run]) -> Column:
    """Test errors. Runs that measure different things say what, and are not compared."""
    texts = [f"{fixed(run.error_before)} → {fixed(run.error_after)}" for run in runs]
    if len({run.metric for run in runs}) == 1:
        return Column(runs[0].metric, [run.error_after for run in runs], texts)
    return Column(
        "test",
        [None] * len(runs),
        [f"{text} {run.metric}" for text, run in zip(texts, runs, strict=True)],
    )


def side_by_side(runs: Sequence[Run]) -> dict[str, list[LayerResult | None]]:
    """Every layer with each run's line about it, if it has one."""
    rows = [{layer.name: layer for layer in run.pruning.layers} for run in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Every setting by name: one value where all runs agree, else one a run. Trials have a table of their own."""
    names = dict.fromkeys(
        key for run in runs for key in run.pruning.settings if not (key == "trials" and trials(run))
    )
    rows = {name: [str(run.pruning.settings.get(name, "–")) for run in runs] for name in names}
    return {name: values if len(set(values)) > 1 else values[:1] for name, values in rows.items()}


def trials(run: Run) -> list[list[str]]:
    """What the search for a largest drop has tried: weights kept, their share, score and drop."""
    found = run.pruning.settings.get("trials")
    total = max(1, run.pruning.total)
    try:
        return [
            [
                f"{int(t['kept']):,}",
                percent(int(t["kept"]) / total),
                number(float(t["score"])),
                number(float(t["drop"])),
            ]
            for t in (found if isinstance(found, list) else [])
        ]
    except (KeyError, TypeError, ValueError, OverflowError):  # a file may say anything
        return []


def environment() -> dict[str, str]:
    """What the numbers may depend on, and nothing that tells whose machine it was."""
    return {
        "lobs": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }
