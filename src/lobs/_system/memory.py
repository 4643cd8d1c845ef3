"""Keep a run within a limit on its resident memory.

A `MemoryLimit` is part of the current `Context`. Code that is about to allocate a large tensor
asks how much room is left. Where there is none, tensors go to temporary files (`Shelf`,
`scratch`). Files are read and written, not mapped: mapped pages would be resident too.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
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
_PROGRAM = 2**29  # bytes that Python, torch and compiled code take, roughly
_WIDE = 8192  # columns from which a second copy of a moment is too much for any machine


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on resident memory.

    Args:
        total: bytes that the process may have resident.
        per_layer: bytes of these that remain for the work on one layer.
    """

    total: int
    per_layer: int

    @classmethod
    def after(cls, total: int, taken: int = 0) -> MemoryLimit:
        """Return the limit of a run whose networks and masks hold `taken` bytes in the end."""
        return cls(total, max(0, total - taken - _PROGRAM))

    def room(self) -> int:
        """Return how many more bytes may become resident now."""
        return max(0, self.total - resident())


def parse(size: str | float) -> int:
    """Return the bytes of a number or of a text such as "8GB" or "512 MiB".

    >>> parse("8GB"), parse("1.5 GiB")
    (8000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    number = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if not 2**20 <= number < 2**60:
        raise LobsError(
            f"memory is {size!r}: give bytes, or a size such as '8GB' or '512MiB', at least 1 MiB."
        )
    return int(number)


def spelled(count: float) -> str:
    """Return a number of bytes as text: 8000000000 → "8.00 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def enough(count: float) -> str:
    """Return a number of bytes as text that `parse` reads as no less.

    >>> enough(705_400_000), enough(8_001_000_000)
    ('706 MB', '8.01 GB')
    """
    if count < 999e6:
        return f"{math.ceil(count / 1e6)} MB"
    return f"{math.ceil(count / 1e7) / 100:.2f} GB"


@contextmanager
def limited(total: int | None, taken: int = 0) -> Iterator[None]:
    """Limit the resident memory of this block to `total` bytes; None sets no limit.

    `taken` is what networks and masks will hold of it in the end.
    """
    from lobs._system import context  # it is built on this module

    bound = None if total is None else MemoryLimit.after(total, taken)
    with context.use(replace(context.current(), memory=bound)):
        yield


def limit() -> int | None:
    """Return the current limit in bytes; None without one."""
    from lobs._system import context

    bound = context.current().memory
    return None if bound is None else bound.total


def room() -> int | None:
    """Return how many more bytes may become resident now; None without a limit."""
    from lobs._system import context

    bound = context.current().memory
    return None if bound is None else bound.room()


def resident() -> int:
    """Return the bytes this process has resident now; 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource  # exists only where /proc does

    return pages * resource.getpagesize()


@contextmanager
def most_resident() -> Iterator[list[int]]:
    """Yield a list whose entry becomes the most memory resident while this block runs.

    The process's own record may be an older peak.
    """
    most, done = [0], Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], resident())

    watcher = Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def single_copy(groups: int, columns: int) -> bool:
    """Return whether a layer's moment must be kept once, in single precision.

    That is so from 8,192 columns on. With a memory limit, it is so from where six copies in double
    precision would take an eighth of the limit. The limit decides, not the memory that is free
    now: the same run must give the same bits.
    """
    bound = limit()
    return groups == 1 and (
        columns >= _WIDE or (bound is not None and 6 * 8 * columns**2 > bound / 8)
    )


class Shelf:
    """An unnamed temporary file of tensors. It is deleted with the last of them."""

    def __init__(self) -> None:
        with _file_errors():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as this lives
        weakref.finalize(self, self._file.close)

    def put(self, tensor: Tensor) -> Shelved:
        """Write a tensor to the file and return a handle that loads it."""
        tensor = tensor.detach().cpu()
        channels_last = (
            tensor.dim() == 4
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        flat = tensor.permute(0, 2, 3, 1) if channels_last else tensor.contiguous()
        with _file_errors():
            start = self._file.seek(0, 2)
            self._file.write(_raw(flat))
            self._file.flush()
        return Shelved(self, start, tensor.dtype, tuple(tensor.shape), channels_last)

    def read(self, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor from the bytes at `start`."""
        with _file_errors():
            self._file.seek(start)
            if self._file.readinto(_raw(out)) != out.numel() * out.element_size():
                raise FileError(
                    "a temporary file is shorter than what was written to it. Run again."
                )


@dataclass(frozen=True)
class Shelved:
    """A tensor in a `Shelf`."""

    shelf: Shelf
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool = False  # the memory format, which it comes back in

    def load(self, into: Tensor | None = None) -> Tensor:
        """Return the tensor, read into new memory or into a contiguous tensor of its size."""
        if self.channels_last and into is None:
            out = torch.empty(self.shape, dtype=self.dtype, memory_format=torch.channels_last)
            self.shelf.read(self.start, out.permute(0, 2, 3, 1))
            return out
        out = torch.empty(self.shape, dtype=self.dtype) if into is None else into
        self.shelf.read(self.start, out)
        return out

    def __getitem__(self, rows: slice) -> Shelved:
        """Return some neighbouring rows, which are not read yet."""
        first, stop, _ = rows.indices(self.shape[0])
        skipped = first * math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(
            self, start=self.start + skipped, shape=(max(0, stop - first), *self.shape[1:])
        )


@contextmanager
def scratch(tensor: Tensor, *, copies: bool) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that returns a copy of `tensor` to overwrite, any number of times.

    Without room for `copies`, it returns the tensor itself, read anew from a temporary file. The
    tensor is restored at the end. Until then no other code may read it.
    """
    if copies or tensor.device.type != "cpu" or not tensor.is_contiguous():
        yield tensor.clone
        return
    shelved = Shelf().put(tensor)
    try:
        yield lambda: shelved.load(into=tensor)
    finally:
        shelved.load(into=tensor)


def _raw(tensor: Tensor) -> Any:
    """Return a view of a contiguous tensor's bytes."""
    return tensor.flatten().view(torch.uint8).numpy().data


@contextmanager
def _file_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = (
            "Raise the number of open files (ulimit -n)"
            if error.errno == errno.EMFILE
            else "Set TMPDIR to a folder with more room, or allow more memory"
        )
        where = f"cannot write what exceeds memory to a temporary file in '{tempfile.gettempdir()}'"
        raise FileError(f"{where}: {error.strerror or error}. {remedy}.") from error


def give_back() -> None:
    """Return freed memory to the system, where the C library can: else it is kept for later."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
