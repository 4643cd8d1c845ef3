"""Progress bars that appear only when asked for and only when the wait is worth one.

Work announces itself with `track(label, total)` and calls the function it gets; nothing is drawn
unless some caller up the stack has opened `shown()`. So solvers report progress without carrying a
display through every signature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lobs._system.run_log import phase

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int], None]
_PATIENCE = 2.0  # seconds before a bar is drawn

_display: ContextVar[Progress | None] = ContextVar("lobs_progress", default=None)


@contextmanager
def shown(enabled: bool = True) -> Iterator[None]:
    """Let `track` draw on stderr inside this block."""
    if not enabled or _display.get() is not None:
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    token = _display.set(bars)
    try:
        yield
    finally:
        if bars.live.is_started:  # stopping what never started would print an empty line
            bars.stop()
        _display.reset(token)


@contextmanager
def track(label: str, total: int | None) -> Iterator[Advance]:
    """Announce a piece of work; the yielded function takes how many units were just done."""
    with phase(label), _drawn(label, total) as advance:
        yield advance


@contextmanager
def _drawn(label: str, total: int | None) -> Iterator[Advance]:
    bars = _display.get()
    if bars is None or not bars.console.is_terminal:
        yield lambda _: None
        return
    task = bars.add_task(label, total=total, visible=False)
    began = time.monotonic()

    def advance(units: int) -> None:
        if time.monotonic() - began > _PATIENCE:
            bars.start()  # idempotent
            bars.update(task, visible=True)
        bars.update(task, advance=units)

    try:
        yield advance
    finally:
        bars.remove_task(task)
