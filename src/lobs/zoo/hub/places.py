"""The output folder: checked before any work, written beside its place, and named at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lobs.errors import FileError


def check_out(out: Path) -> None:
    """Refuse an output folder that cannot be made, before any work."""
    if out.exists() and not out.is_dir():
        raise FileError(f"out is '{out}', a file: give a new folder.")
    nearest = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise FileError(f"cannot make the folder '{out}' in '{nearest}': choose another place.")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which takes its name when the block succeeds."""
    if out.exists() and any(out.iterdir()):
        raise FileError(f"out is '{out}', which is not empty: give an empty or a new folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        remove_if_empty(out)
        partial.rename(out)
    except OSError as error:
        raise FileError(f"cannot write '{out}': {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_folders(source: Path, out: Path) -> None:
    """Copy folders of settings, such as those of sentence-transformers; none that holds weights."""
    for path in sorted(p for p in source.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = [p for p in path.rglob("*") if p.is_file()]
        if files and all(p.suffix in (".json", ".txt", ".model") for p in files):
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing; leave any other."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
