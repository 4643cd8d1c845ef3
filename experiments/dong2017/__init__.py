"""Reproduce Dong, Chen, Pan (NeurIPS 2017), table by table.

The paper is "Learning to Prune Deep Neural Networks via Layer-wise Optimal Brain Surgeon".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.dong2017 import (
    cost,
    first_layer,
    readme,
    resnet,
    retraining_curves,
    sensitivity,
    table1,
    table2,
    tuning,
)
from experiments.dong2017.lab import HERE, Lab
from lobs.errors import DataError, FileError, LobsError

EXPERIMENTS: dict[str, Any] = {
    "table1": table1,
    "table2": table2,
    "first-layer": first_layer,
    "sensitivity": sensitivity,
    "retraining": retraining_curves,
    "resnet": resnet,
    "cost": cost,
    "tuning": tuning,
}
# The quick version runs a few rows of each table, enough to show that everything works.
_QUICK = {
    "tuning": ["tuning/rate-0.002"],
    "first-layer": ["first-layer/magnitude", "first-layer/lobs"],
    "table1": [
        *(
            f"lenet300/{row}"
            for row in (
                "lwc",
                "obd",
                "dns",
                "lobs",
                "lobs-iterative",
                "greedy",
                "default",
                "ours-staged-1.5",
            )
        ),
        *(f"lenet5/{row}" for row in ("lwc", "lobs", "greedy", "default-light")),
        *(f"cifarnet/{row}" for row in ("lobs", "default")),
    ],
    "resnet": ["resnet50/dense", "resnet50/magnitude-50"],
    "table2": ["table2/nettrim-7.4", "table2/lobs-7.4", "table2/greedy-7.4", "table2/memory"],
}


def listing() -> dict[str, list[str]]:
    """Return the rows of every experiment."""
    return {name: module.names() for name, module in EXPERIMENTS.items()}


def readme_path(out: Path | None, quick: bool) -> Path:
    """Return the path of the page of results."""
    return _home(out, quick) / "README.md"


def _home(out: Path | None, quick: bool) -> Path:
    return out if out is not None else Path("dong2017-quick") if quick else HERE


def run(
    what: list[str] | None,
    rows: list[str] | None,
    *,
    quick: bool = False,
    again: bool = False,
    out: Path | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run the chosen rows that have no result yet, and return their results.

    The page of results is written after every experiment. Without `what`, an experiment whose data
    is missing is skipped with a line that says how to get the data.

    Args:
        what: experiments to run; all by default.
        rows: parts of row names; all rows by default.
        quick: run a small version.
        again: repeat rows that already have a result.
        out: folder for results; this package's own by default.
        seed: seed of every random draw.
        say: receives one line per finished row.
    """
    unknown = [name for name in what or [] if name not in EXPERIMENTS]
    if unknown:
        raise LobsError(
            f"there is no experiment '{unknown[0]}'. There are: {', '.join(EXPERIMENTS)}."
        )
    lab = Lab(_home(out, quick), quick, again, seed, say)
    done: list[dict[str, Any]] = []
    matched = False
    for name in what or EXPERIMENTS:
        module = EXPERIMENTS[name]
        offered = _QUICK.get(name, module.names()) if quick and rows is None else module.names()
        for group in _groups(
            [row for row in offered if rows is None or _asked_for(row, rows, offered)]
        ):
            matched = True
            try:
                done += module.run(lab, group)
            except (DataError, FileError) as error:
                if what is not None:
                    raise
                say(f"skipped {group[0]} and {len(group) - 1} more: {error}")
        readme.write(lab)
    if not matched:
        raise LobsError(
            f"--rows {','.join(rows or [])} matches no row. "
            "`python -m experiments.dong2017 --list` lists them."
        )
    return done


def _asked_for(row: str, parts: list[str], offered: list[str]) -> bool:
    """Return whether a part occurs in the row's name. A part that is a whole name means that row only."""
    return any(part == row if part in offered else part in row for part in parts)


def _groups(rows: list[str]) -> list[list[str]]:
    """Group rows by network. One network's missing data then does not stop the others."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.split("/")[0], []).append(row)
    return list(found.values())
