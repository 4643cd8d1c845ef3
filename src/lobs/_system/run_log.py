"""What a run spends its time on, and how much memory it took: for the result, and as JSON lines for machines.

Every piece of work that announces itself (`progress.track`, `phase`) is timed while some caller up the stack has opened
`observed()`. Only the outermost pieces count towards the totals, so that these add up to what has passed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lobs.errors import FileError


@dataclass
class Observer:
    """Seconds by phase, in the order in which phases first came."""

    log: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    depth: int = 0

    def tell(self, event: str, **fields: Any) -> None:
        """One line of the log."""
        if self.log is not None:
            line = {"time": round(time.time(), 3), "event": event, **fields, "peak_bytes": peak_bytes()}
            self.log.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            self.log.flush()


_observer: ContextVar[Observer | None] = ContextVar("lobs_observer", default=None)


@contextmanager
def observed(log: str | os.PathLike[str] | None = None) -> Iterator[Observer]:
    """Time what runs in this block, and write a JSON line at the beginning and end of everything to `log`."""
    try:
        stream: Any = nullcontext() if log is None else Path(log).open("a", encoding="utf-8")  # noqa: SIM115 - entered below
    except OSError as error:
        raise FileError(f"cannot write '{log}': {error.strerror}.") from error
    with stream as file:
        observer = Observer(file)
        token = _observer.set(observer)
        try:
            yield observer
        finally:
            _observer.reset(token)


@contextmanager
def phase(label: str, **fields: Any) -> Iterator[None]:
    """A piece of work with a name; what stands after " of " in it is detail."""
    observer = _observer.get()
    if observer is None:
        yield
        return
    name, _, detail = label.partition(" of ")
    fields = fields | ({"of": detail} if detail else {})
    observer.tell("begin", phase=name, depth=observer.depth, **fields)
    observer.depth += 1
    began = time.perf_counter()
    ended = "failed"
    try:
        yield
        ended = "end"
    finally:
        observer.depth -= 1
        took = time.perf_counter() - began
        if observer.depth == 0:
            observer.seconds[name] = observer.seconds.get(name, 0.0) + took
        observer.tell(ended, phase=name, depth=observer.depth, seconds=round(took, 6), **fields)


def tell(event: str, **fields: Any) -> None:
    """Log something that happened, where somebody listens."""
    observer = _observer.get()
    if observer is not None:
        observer.tell(event, **fields)


def peak_bytes() -> int | None:
    """The most memory that this process has ever had resident; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
