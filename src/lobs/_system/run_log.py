"""What a run spends its time on, and how much memory it took: for the result, and as JSON lines for machines.

Every piece of work that announces itself (`progress.track`, `phase`) is timed while some caller up
the stack has opened `recorded_run()`. Only the outermost pieces count towards the totals, so that
these add up to what has passed.
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
class RunLog:
    """Seconds by phase, in the order in which phases first came."""

    log: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    depth: int = 0

    def write(self, event: str, **fields: Any) -> None:
        """One line of the log."""
        if self.log is not None:
            line = {
                "time": round(time.time(), 3),
                "event": event,
                **fields,
                "peak_bytes": peak_bytes(),
            }
            self.log.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            self.log.flush()


_run_log: ContextVar[RunLog | None] = ContextVar("lobs_run_log", default=None)


@contextmanager
def recorded_run(log: str | os.PathLike[str] | None = None) -> Iterator[RunLog]:
    """Time what runs in this block, and write a JSON line at the beginning and end of everything to `log`."""
    try:
        stream: Any = nullcontext() if log is None else Path(log).open("a", encoding="utf-8")  # noqa: SIM115 - entered below
    except OSError as error:
        raise FileError(f"cannot write '{log}': {error.strerror}.") from error
    with stream as file:
        run_log = RunLog(file)
        token = _run_log.set(run_log)
        try:
            yield run_log
        finally:
            _run_log.reset(token)


@contextmanager
def phase(label: str, **fields: Any) -> Iterator[None]:
    """A piece of work with a name; what stands after " of " in it is detail."""
    run_log = _run_log.get()
    if run_log is None:
        yield
        return
    name, _, detail = label.partition(" of ")
    fields = fields | ({"of": detail} if detail else {})
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
        if run_log.depth == 0:
            run_log.seconds[name] = run_log.seconds.get(name, 0.0) + took
        run_log.write(ended, phase=name, depth=run_log.depth, seconds=round(took, 6), **fields)


def log_event(event: str, **fields: Any) -> None:
    """Log something that happened, where somebody listens."""
    run_log = _run_log.get()
    if run_log is not None:
        run_log.write(event, **fields)


def peak_bytes() -> int | None:
    """The most memory that this process has ever had resident; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
