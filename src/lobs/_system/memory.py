"""How much memory a run may take, and what steps aside when it is short.

`limited(bytes)` sets the promise for everything inside; whoever is about to make something large
asks `room()`, and large tensors go to files of their own (`Shelf`, `scratch`) where there is none.
Resident memory is what counts, so files are read and written, not mapped: mapped pages would be
resident too.
"""

from __future__ import annotations

import errno
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lobs.errors import FileError, LobsError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_promise: ContextVar[tuple[int, int] | None] = ContextVar("lobs_memory", default=None)
_PROGRAM = 2**29  # bytes that Python, torch and compiled code take by themselves, roughly


def parse(size: str | float) -> int:
    """Bytes from a number or from words such as "8GB" or "512 MiB".

    >>> parse("8GB"), parse("1.5 GiB")
    (8000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    number = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if not 2**20 <= number < 2**60:
        raise LobsError(
            f"memory is {size!r}: give bytes, or a size such as '8GB' or '512MiB', at least a "
            "mebibyte."
        )
    return int(number)


def spelled(count: float) -> str:
    """Bytes in words: 8000000000 → "8.00 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


@contextmanager
def limited(limit: int | None, taken: int = 0) -> Iterator[None]:
    """Promise that what runs in this block takes no more resident memory than this; None promises nothing.

    `taken` is what networks and masks will hold of it in the end.
    """
    token = _promise.set(None if limit is None else (limit, max(0, limit - taken - _PROGRAM)))
    try:
        yield
    finally:
        _promise.reset(token)


def limit() -> int | None:
    """The promise, if there is one."""
    promise = _promise.get()
    return None if promise is None else promise[0]


def affords(count: float) -> bool:
    """Does the promise leave so much for one layer's work? The same answer each time, whatever is free just now."""
    promise = _promise.get()
    return promise is None or count <= promise[1]


def resident() -> int:
    """Bytes that this process has resident now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource  # only where there is /proc

    return pages * resource.getpagesize()


def room() -> int | None:
    """How many more bytes may be taken; None where nothing was promised."""
    promised = limit()
    return None if promised is None else max(0, promised - resident())


def fits(count: float) -> bool:
    """May so many bytes be taken beside what there is?"""
    left = room()
    return left is None or count <= left


# Columns from which one more copy of a moment is too much for anybody.
_WIDE = 8192


def single_copy(groups: int, columns: int) -> bool:
    """Must the moment of a layer this wide be kept once, in single precision?

    From 8,192 columns on; where memory is limited, from where six copies in double precision would
    take an eighth of it. Decided by the limit, not by what is free at the moment: the same run must
    give the same bits.
    """
    promised = limit()
    return groups == 1 and (
        columns >= _WIDE or (promised is not None and 6 * 8 * columns**2 > promised / 8)
    )


class Shelf:
    """An unnamed temporary file for several tensors, which goes when the last of them goes."""

    def __init__(self) -> None:
        with _one_line():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as this lives
        weakref.finalize(self, self._file.close)

    def put(self, tensor: Tensor) -> Shelved:
        """Write a tensor down; it may be given up afterwards."""
        tensor = tensor.detach().cpu().contiguous()
        with _one_line():
            start = self._file.seek(0, 2)
            self._file.write(_raw(tensor))
            self._file.flush()
        return Shelved(self, start, tensor.dtype, tuple(tensor.shape))

    def read(self, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor from what stands at a place."""
        with _one_line():
            self._file.seek(start)
            if self._file.readinto(_raw(out)) != out.numel() * out.element_size():
                raise FileError("a temporary file has been cut short. Run again.")


@dataclass(frozen=True)
class Shelved:
    """A tensor on a shelf."""

    shelf: Shelf
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self, into: Tensor | None = None) -> Tensor:
        """Read it, into new memory or into a contiguous tensor of its size."""
        out = torch.empty(self.shape, dtype=self.dtype) if into is None else into
        self.shelf.read(self.start, out)
        return out


@contextmanager
def scratch(tensor: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that gives a copy to overwrite, as often as it is asked.

    Where there is no room for a copy it is the tensor itself, read anew each time from a file, and
    once more in the end; until then nobody else may look at it.
    """
    size = tensor.numel() * tensor.element_size()
    if fits(size) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        yield tensor.clone
        return
    shelved = Shelf().put(tensor)
    try:
        yield lambda: shelved.load(into=tensor)
    finally:
        shelved.load(into=tensor)


def _raw(tensor: Tensor) -> Any:
    """A contiguous tensor's bytes, shared with it."""
    return tensor.flatten().view(torch.uint8).numpy().data


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = (
            "Raise the number of open files (ulimit -n)"
            if error.errno == errno.EMFILE
            else "Set TMPDIR to a folder with more room, or allow more memory"
        )
        where = f"cannot put aside what does not fit into memory, in '{tempfile.gettempdir()}'"
        raise FileError(f"{where}: {error.strerror or error}. {remedy}.") from error
