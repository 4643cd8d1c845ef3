"""Find data sets that are too large to ship, in a given folder or in that of LOBS_DATA."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from lobs.errors import DataError


def find(
    names: Sequence[str], given: str | os.PathLike[str] | None, *, what: str, steps: str
) -> Path:
    """Return the first of `names` that exists in a folder, or up to two levels below it.

    Args:
        names: files or folders, any of which will do; "." stands for the folder itself.
        given: the folder to search; that of LOBS_DATA if None.
        what: the data set's name, for the message.
        steps: how to get it, for the message.
    """
    chosen = given if given is not None else os.environ.get("LOBS_DATA")
    if chosen is None:
        raise DataError(
            f"{what} does not come with lobs, and neither --data nor LOBS_DATA says where it is. "
            f"{steps}"
        )
    root = Path(chosen).expanduser()
    if not root.exists():
        raise DataError(f"{what}: there is no '{root}'. {steps}")
    if root.is_file():
        return root
    for folder in (
        root,
        *sorted(p for p in root.glob("*") if p.is_dir()),
        *sorted(p for p in root.glob("*/*") if p.is_dir()),
    ):
        for name in names:
            if (folder / name).exists():
                return folder / name
    raise DataError(
        f"{what}: no {' or '.join(names)} in '{root}' or in the folders below it. {steps}"
    )


def check_hash(path: Path, sha256: str, what: str) -> None:
    """Refuse a file whose contents are not the published ones."""
    with path.open("rb") as file:
        found = (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest(path)
        )
    if found != sha256:
        raise DataError(
            f"{what}: '{path}' is damaged: sha256 {found[:12]}…, expected {sha256[:12]}…. Fetch it "
            "again."
        )


def _digest(path: Path) -> str:  # Python 3.10 has no file_digest
    return hashlib.sha256(path.read_bytes()).hexdigest()
