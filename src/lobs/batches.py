"""The user's batches, read with care: whatever goes wrong while reading says which batch it was.

Data come from user code: a loader may raise in the middle, a network may choke on one batch. Both become one error that
names the batch and keeps the cause; nothing of ours stays behind on the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from lobs.errors import CalibrationError, LobsError


class Batches:
    """Somebody's iterable of batches; iterates like it, and has a length where that has one."""

    def __init__(self, source: Iterable[Any], name: str = "calibration") -> None:
        self.source, self.name = source, name

    def __iter__(self) -> Iterator[Any]:
        with told(f"reading the first {self.name} batch"):
            batches = iter(self.source)
        for index in count():
            with told(f"reading {self.name} batch {index}"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


def guarded(batches: Iterable[Any], *, again: bool = True, name: str = "batches") -> Batches:
    """The same batches, whose errors are ours; if they are needed again, a generator is read into memory."""
    if isinstance(batches, Batches):
        return batches
    if isinstance(batches, Tensor | str | bytes | dict) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{name} is a {type(batches).__name__}: give a list of batches or a DataLoader; one tensor x is [x]."
        )
    source = Batches(batches, "calibration" if name == "batches" else name)
    return Batches(list(source)) if again and isinstance(batches, Iterator) else source


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what user code raises into a `CalibrationError` that says what was being done."""
    try:
        yield
    except (LobsError, StopIteration):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        raise CalibrationError(f"{what} raised {type(error).__name__}: {text}") from error
