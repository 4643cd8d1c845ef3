"""Check where a command writes, before any work is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lobs.errors import FileError

# Endings of other kinds of file that people type by habit.
_FOREIGN = {
    ".safetensors": (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".h5", ".onnx", ".pt2", ".html"),
    ".html": (".pdf", ".md", ".txt", ".json", ".png", ".safetensors"),
}


def writable(path: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist or takes no files."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise FileError(
            f"cannot write '{path}': there is no folder '{path.parent}'; make it first."
        )
    if path.is_dir():
        raise FileError(f"cannot write '{path}': it is a folder; name a file in it.")
    if not os.access(path.parent, os.W_OK):
        raise FileError(
            f"cannot write '{path}': the folder '{path.parent}' is read-only; choose another."
        )
    return path


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
        ending: the ending of this kind of file; well-known other endings are refused.
    """
    if out is not None:
        right_ending(out, "--out", ending)
    path = unclaimed(out, Path(default), force=force)
    writable(path)
    return path


def unclaimed(out: Path | None, default: Path, *, force: bool = False) -> Path:
    """Return `out`, or the default name if nothing has it yet."""
    if out is None and default.exists() and not force:
        raise FileError(
            f"'{default}' exists: overwrite it with --force, or choose a name with --out."
        )
    return out or default


def right_ending(path: Path | None, option: str, ending: str) -> Path | None:
    """Refuse a well-known ending of another kind of file."""
    if path is not None and path.suffix.lower() in _FOREIGN.get(ending, ()):
        what = "safetensors files" if ending == ".safetensors" else f"{ending[1:].upper()} pages"
        raise FileError(
            f"{option} '{path}' ends in {path.suffix}, but lobs writes {what} there: use {option} "
            f"{path.with_suffix(ending)}."
        )
    return path


def distinct(path: Path | None, option: str, *others: Path | None) -> None:
    """Refuse to overwrite a file that the same command reads or writes."""
    if path is not None and any(
        other is not None and path.resolve() == other.resolve() for other in others
    ):
        raise FileError(
            f"{option} '{path}' would overwrite what this command reads or writes there; give it "
            "another name."
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
