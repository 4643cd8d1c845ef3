"""Watching layers without leaving a trace: whatever is put on comes off, also when something raises on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]


class Handle:
    """Undoes one observation; removing it twice is once."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def remove(self) -> None:
        """Put everything back, last things first."""
        while self._undo:
            self._undo.pop()()

    @classmethod
    def of(cls, *starts: Callable[[], Undo]) -> Handle:
        """Start several things that each say how to undo them; if one fails, those before it are undone."""
        handle = cls()
        try:
            for start in (_leave_fast_path, *starts):
                handle._undo.append(start())
        except BaseException:
            handle.remove()
            raise
        return handle


_lock = Lock()
_watchers = 0
_was_enabled = True


def _leave_fast_path() -> Undo:
    """Keep torch's fused transformer kernels off while anything observes: they compute past the modules."""
    global _watchers, _was_enabled  # noqa: PLW0603 - torch's own switch is global too
    with _lock:
        if _watchers == 0:
            _was_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _watchers += 1
    return _return_to_fast_path


def _return_to_fast_path() -> None:
    global _watchers  # noqa: PLW0603
    with _lock:
        _watchers -= 1
        if _watchers == 0:
            torch.backends.mha.set_fastpath_enabled(_was_enabled)


@contextmanager
def watching(observations: Iterable[Handle]) -> Iterator[None]:
    """Observe for as long as the block runs. Give a generator: if one observation fails, those before it come off."""
    with ExitStack() as stack:
        for handle in observations:
            stack.callback(handle.remove)
        yield
