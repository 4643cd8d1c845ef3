"""Writing files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lobs.errors import FileError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path` to write to; it takes the name only when the block has ended well and the bytes are on disk.

    Errors of the operating system, in the block too, become one `FileError`.
    """
    target, partial = Path(path), None
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(0o644)
        _sync(partial)
        partial.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise FileError(f"cannot write '{target}': {error.strerror or error}.") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """A folder to write into, made where it is missing, with a clear error where it cannot be."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder '{folder}': {error.strerror}.") from error
    return folder


def _sync(path: Path) -> None:
    """Ask for a file's bytes, or a folder's names, to be on disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders, and orders renames itself
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
