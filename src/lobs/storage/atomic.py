"""Write files atomically: a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lobs.errors import FileError

_SUFFIX = ".lobs-part"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which is renamed to `path` when the block succeeds.

    The bytes are on disk before the rename. A link is followed, and the file keeps its permissions;
    a new file gets those of the umask. Errors of the operating system become one `FileError`, also
    those raised in the block.
    """
    target, partial = Path(path), None
    try:
        place = Path(os.path.realpath(target))
        _remove_stale(place)
        handle, name = tempfile.mkstemp(
            dir=place.parent, prefix=f".{place.name}.{_process()}.", suffix=_SUFFIX
        )
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(_mode(place))
        _sync(partial)
        partial.replace(place)
        _sync(place.parent)
    except OSError as error:
        raise FileError(f"cannot write '{target}': {error.strerror or error}.") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _mode(place: Path) -> int:
    """Return the permissions of the file that is replaced, or those of a new file."""
    try:
        return stat.S_IMODE(place.stat().st_mode)
    except FileNotFoundError:
        return 0o666 & ~_umask()


def _umask() -> int:
    """Return the umask. Reading it by setting it would change it for other threads."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _process() -> str:
    """Return a name for this process: the machine and the process id."""
    return f"{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-{os.getpid()}"


def _remove_stale(place: Path) -> None:
    """Remove temporary files for the same target whose process on this machine was killed."""
    machine = _process().partition("-")[0]
    for rest in place.parent.glob(f".{_literal(place.name)}.{machine}-*{_SUFFIX}"):
        number = rest.name.rpartition(f"{machine}-")[2].partition(".")[0]
        with suppress(OSError, ValueError):
            if not _alive(int(number)):
                rest.unlink()


def _alive(number: int) -> bool:
    if os.name == "nt":  # there a signal 0 would end the process
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def _literal(name: str) -> str:
    """Return a file name as a glob that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder with its parents if it is missing; return it, or raise `FileError`."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a name may hold null bytes
        raise FileError(f"cannot make the folder {str(folder)!r}: {error}.") from error
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
