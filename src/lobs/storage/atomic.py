"""Write files atomically: a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lobs.errors import FileError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which is renamed to `path` when the block succeeds.

    The bytes are on disk before the rename. Errors of the operating system become one `FileError`,
    also those raised in the block.
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
    """Make a folder with its parents if it is missing; return it, or raise `FileError`."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder '{folder}': {error.strerror}.") from error
    return folder


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders; it orders renames itself
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
