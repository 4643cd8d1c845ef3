"""Write to people and to programs: lines, tables, JSON, and warnings as short notes."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TextIO

from lobs._system.progress import shown
from lobs.errors import NumericalWarning, printable, warning_once

output: TextIO | None = None  # where JSON goes when standard output is kept for it

_GAP = 2  # spaces between columns of a table


@dataclass(frozen=True)
class Column:
    """A column of a table. Columns of the highest `rank` are left out first where room is short."""

    name: str
    rank: int = 0


def print_json(document: Any) -> None:
    """Write JSON to standard output; NaN and infinity, which JSON lacks, become null."""
    stream = output or sys.stdout
    stream.write(json.dumps(_finite(document), indent=2, ensure_ascii=False) + "\n")
    stream.flush()  # at its end the process flushes only what `sys.stdout` is then


def print_table(
    title: str, columns: Sequence[str | Column], rows: Sequence[Sequence[str]], *, note: str = ""
) -> None:
    """Print a table that fits the terminal: the first column left, the others right.

    Args:
        title: a line above it; may be empty.
        columns: names; a `Column` with a rank above 0 is left out where the terminal is too narrow.
        rows: one text for each column.
        note: a line below it.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    # A pipe has no width: leave the lines whole for the program that reads them.
    room = console.width if console.is_terminal or "COLUMNS" in os.environ else 160
    heads = [column if isinstance(column, Column) else Column(column) for column in columns]
    chosen = fitting(heads, rows, room)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for place, index in enumerate(chosen):
        table.add_column(
            heads[index].name,
            justify="left" if place == 0 else "right",
            no_wrap=place > 0,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(escape(printable(row[index])) for index in chosen))
    console.width = room
    if title:
        console.print(title, style="bold", markup=False)
    console.print(table)
    left_out = [head.name for index, head in enumerate(heads) if index not in chosen]
    if left_out:
        note = f"{note}\n" if note else ""
        note += f"not shown at {room} columns: {', '.join(left_out)} (--json has them)"
    if note:
        console.print(note, style="dim", markup=False)


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return the columns that fit into `room` characters, as indices; rank 0 always stays."""
    widths = [
        max([len(column.name), *(len(row[i]) for row in rows)]) + _GAP
        for i, column in enumerate(columns)
    ]
    chosen = list(range(len(columns)))
    while sum(widths[i] for i in chosen) - _GAP > room:
        last = max(chosen, key=lambda i: (columns[i].rank, i))
        if columns[last].rank == 0:
            break
        chosen.remove(last)
    return chosen


def say(text: str) -> None:
    """Write a line for people to standard output."""
    sys.stdout.write("\n".join(map(printable, text.split("\n"))) + "\n")
    sys.stdout.flush()


def announce(path: object, json: bool) -> None:
    """Say where the result will be written, before any work."""
    if leads() and not json:
        say(f"result goes to {path}")


def leads() -> bool:
    """Return whether this process speaks for all that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def optional(value: float | None, form: str = ".4g") -> str:
    """Return a number as text, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def change(metric: str, before: float | None, after: float | None) -> str:
    """Return a metric before and after, in one line."""
    return f"{metric}: {optional(before)} → {optional(after)}"


@contextmanager
def notes() -> Iterator[None]:
    """Show numerical warnings as one-line notes on standard error when the block ends."""
    seen: dict[str, str] = {}

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = str(message)
        kind = re.sub(r"= \d[\d.e+-]*", "=", text)  # a later round has another damping
        if kind not in seen:
            label = "note" if issubclass(category, NumericalWarning) else "warning"
            seen[kind] = f"{label}: {printable(text)}\n"

    with warnings.catch_warnings():
        warnings.simplefilter("always", NumericalWarning)
        warnings.showwarning = show
        try:
            with warning_once():
                yield
        finally:
            sys.stderr.writelines(seen.values() if leads() else ())


@contextmanager
def working(json: bool) -> Iterator[None]:
    """Show progress, also while torch is imported and the network is opened."""
    with shown(leads() and not json):
        yield


def with_notes(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that gives its notes at the end, after its result."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with notes():
            command(*args, **options)

    return run


def command_line() -> str:
    """Return the command as typed, for records and reports."""
    import shlex

    return "lobs " + shlex.join(sys.argv[1:])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
