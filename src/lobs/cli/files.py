"""Check where a command writes, before any work is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lobs.errors import FileError
from lobs.storage.outputs import output_path


def makeable(path: Path) -> Path:
    """Refuse an output folder that could not be made or written to, without making it."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise FileError(
            f"cannot make the folder '{path}': '{nearest}' is a file; choose another name."
        )
    if not os.access(nearest, os.W_OK):
        raise FileError(
            f"cannot make the folder '{path}': '{nearest}' is read-only; choose another."
        )
    return path


def output_file(
    out: Path | None, default: str, *, force: bool = False, ending: str = ".safetensors"
) -> Path:
    """Return where to write, checked.

    What `--out` names is overwritten. A default name is not: nobody has named the file that would
    be lost.

    Args:
        out: what `--out` says, if anything.
        default: the name to take otherwise.
        force: overwrite a file of the default name too.
        ending: the ending of this kind of file; those of other kinds are refused.
    """
    return output_path(unclaimed(out, Path(default), force=force), ending)


def unclaimed(out: Path | None, default: Path, *, force: bool = False) -> Path:
    """Return `out`, or the default name if nothing has it yet."""
    if out is None and default.exists() and not force:
        raise FileError(
            f"'{default}' exists: overwrite it with --force, or choose a name with --out."
        )
    return out or default


def distinct(path: Path | None, option: str, *others: Path | None) -> None:
    """Refuse to overwrite a file that the same command reads or writes."""
    if path is not None and any(
        other is not None and path.resolve() == other.resolve() for other in others
    ):
        raise FileError(
            f"{option} '{path}' would overwrite what this command reads or writes there; give it "
            "another name."
        )


def outside(path: Path | None, option: str, folder: Path | None) -> None:
    """Refuse to write into the folder of a run store, whose files belong to the run."""
    if path is not None and folder is not None and folder.resolve() in path.resolve().parents:
        raise FileError(
            f"{option} '{path}' lies in the folder of --resume '{folder}', which belongs to the "
            "run: write it elsewhere."
        )


def file_of(network: str) -> Path | None:
    """Return the file that a network is read from, if it is one."""
    return Path(network) if Path(network).is_file() else None


def default_name(network: str, *words: str, ending: str = ".safetensors") -> str:
    """Make a file name from a network's and a few words.

    >>> default_name("lenet300", "keep7")
    'lenet300-keep7.safetensors'
    >>> default_name("mycode:network", "2of4")
    'mycode-network-2of4.safetensors'
    >>> default_name("runs/small.safetensors", "shrunk")
    'small-shrunk.safetensors'
    """
    name = Path(network).name if file_of(network) or network.endswith(".safetensors") else network
    stem = name.removesuffix(".safetensors").removesuffix(".compact")
    plain = re.sub(r"[^\w.+-]+", "-", "-".join([stem, *words])).strip("-.")
    return (plain or "network") + ending
