"""Time the phases of a run, for the result, for a JSON log and for Python's `logging`.

Every phase that announces itself (`progress.track`, `phase`) is timed while a caller has opened
`recorded_run()`. Only the outermost phases count towards the totals, so the totals add up to the
time that has passed.

The logger `lobs` gets a line for every outermost phase (INFO), every inner phase (DEBUG) and every
event (DEBUG).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from lobs.errors import FileError, caution

logger = logging.getLogger("lobs")
logger.addHandler(logging.NullHandler())


class Listener(Protocol):
    """An object that is notified when phases begin and end, such as a progress display."""

    def begin(self, name: str, detail: str) -> None:
        """Take note of a phase that begins."""

    def end(self) -> None:
        """Take note that the innermost phase has ended."""


@dataclass
class RunLog:
    """Seconds by phase, in the order in which phases first came."""

    log: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    depth: int = 0

    def write(self, event: str, **fields: Any) -> None:
        """Write one line of the log."""
        if self.log is not None:
            line = {
                "time": round(time.time(), 3),
                "event": event,
                **fields,
                "peak_bytes": peak_bytes(),
            }
            try:
                self.log.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
                self.log.flush()
            except OSError as error:  # a full disk must not end the run
                self.log = None
                caution(f"the log is no longer written: {error.strerror or error}.")


_run_log: ContextVar[RunLog | None] = ContextVar("lobs_run_log", default=None)
_listener: ContextVar[Listener | None] = ContextVar("lobs_listener", default=None)


@contextmanager
def recorded_run(log: str | os.PathLike[str] | None = None) -> Iterator[RunLog]:
    """Time the phases in this block; with `log`, append a JSON line when one begins or ends."""
    try:
        stream: Any = nullcontext() if log is None else Path(log).open("a", encoding="utf-8")  # noqa: SIM115 - entered below
    except (OSError, ValueError) as error:  # a name may hold null bytes
        raise FileError(f"cannot write {str(log)!r}: {error}.") from error
    with closing_quietly(stream) as file:
        run_log = RunLog(file)
        token = _run_log.set(run_log)
        try:
            yield run_log
        finally:
            _run_log.reset(token)


@contextmanager
def closing_quietly(stream: Any) -> Iterator[Any]:
    """Enter a stream, and close it even where its last bytes find no room on the disk."""
    file = stream.__enter__()
    try:
        yield file
    finally:
        with suppress(OSError):
            stream.__exit__(None, None, None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Notify a listener of the phases in this block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def phase(label: str, **fields: Any) -> Iterator[None]:
    """Name a piece of work. What follows " of " in the label is detail, such as a layer."""
    name, _, detail = label.partition(" of ")
    detail = detail or str(fields.get("layer", ""))
    listener = _listener.get()
    if listener is not None:
        listener.begin(name, detail)
    try:
        with _timed(name, fields | ({"of": detail} if " of " in label else {})):
            yield
    finally:
        if listener is not None:
            listener.end()


@contextmanager
def _timed(name: str, fields: dict[str, Any]) -> Iterator[None]:
    run_log = _run_log.get() or RunLog()
    run_log.write("begin", phase=name, depth=run_log.depth, **fields)
    run_log.depth += 1
    began = time.perf_counter()
    ended = "failed"
    try:
        yield
        ended = "end"
    finally:
        run_log.depth -= 1
        took = time.perf_counter() - began
        outermost = run_log.depth == 0
        if outermost:
            run_log.seconds[name] = run_log.seconds.get(name, 0.0) + took
        run_log.write(ended, phase=name, depth=run_log.depth, seconds=round(took, 6), **fields)
        words = " ".join([name, *map(str, fields.values())])
        level = logging.INFO if outermost else logging.DEBUG
        logger.log(level, "%s: %.2f s%s", words, took, "" if ended == "end" else " (failed)")


def log_event(event: str, **fields: Any) -> None:
    """Write an event to the run's log and to the logger `lobs`."""
    run_log = _run_log.get()
    if run_log is not None:
        run_log.write(event, **fields)
    logger.debug("%s %s", event, fields)


def peak_bytes() -> int | None:
    """Return this process's largest resident memory so far; None where the system hides it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
