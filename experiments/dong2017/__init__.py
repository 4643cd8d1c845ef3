"""Dong, Chen, Pan: Learning to Prune Deep Neural Networks via Layer-wise Optimal Brain Surgeon (NeurIPS 2017), table by table."""

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
# The quick version of a table takes what shows that everything runs, not every row.
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
                "exact",
                "default",
                "ours-staged-1.5",
            )
        ),
        *(f"lenet5/{row}" for row in ("lwc", "lobs", "exact", "default-light")),
        *(f"cifarnet/{row}" for row in ("lobs", "default")),
    ],
    "resnet": ["resnet50/dense", "resnet50/magnitude-50"],
    "table2": ["table2/nettrim-7.4", "table2/lobs-7.4", "table2/exact-7.4", "table2/memory"],
}


def listing() -> dict[str, list[str]]:
    """Every experiment and its rows."""
    return {name: module.names() for name, module in EXPERIMENTS.items()}


def readme_path(out: Path | None, quick: bool) -> Path:
    """Where the page of results is written."""
    return _home(out, quick) / "README.md"


def _home(out: Path | None, quick: bool) -> Path:
    return out if out is not None else Path("lobs-reproduce-quick") if quick else HERE


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
    """Run what is chosen, skip what is done, and write the page anew after every experiment.

    Where everything is asked for, an experiment whose data is missing is passed over with a line
    that says how to get it.
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
                say(f"passed over {group[0]} and {len(group) - 1} more: {error}")
        readme.write(lab)
    if not matched:
        raise LobsError(
            f"--rows {','.join(rows or [])} matches nothing. `lobs reproduce --list` says what "
            "there is."
        )
    return done


def _asked_for(row: str, parts: list[str], offered: list[str]) -> bool:
    """Whether a part of a name stands in this row's; a whole name means that row and no longer one."""
    return any(part == row if part in offered else part in row for part in parts)


def _groups(rows: list[str]) -> list[list[str]]:
    """Rows by network, so that one network's missing data does not keep the others from running."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.split("/")[0], []).append(row)
    return list(found.values())
