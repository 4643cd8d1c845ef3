"""Check where a file is to be written, before any work: argument order, extension, folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lobs.errors import FileError

SAFETENSORS, ONNX, PROGRAM, PAGE = ".safetensors", ".onnx", ".pt2", ".html"
# A safetensors file with one of these names would mislead the program that opens it.
_OTHER_FORMATS = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"), "a pickle"),
    ONNX: "an ONNX file",
    PROGRAM: "a torch.export program",
    PAGE: "a web page",
    ".gguf": "a GGUF file",
    ".h5": "an HDF5 file",
    ".npz": "a NumPy archive",
}


def check_order(model: Any, path: Any, call: str) -> None:
    """Refuse a path where the network belongs, and show the right line.

    Args:
        model: the argument that must be a network or a state dict.
        path: the argument that must be a path.
        call: the right line, with `{path}` where the path belongs.
    """
    if isinstance(model, str | os.PathLike):
        right = call.format(path=repr(os.fspath(model)))
        raise FileError(f"the network comes before the path: write {right}.")
    if hasattr(model, "masks") and hasattr(model, "model"):
        right = call.format(path=repr(path) if isinstance(path, str) else "path")
        raise FileError(f"this is a result: give its network, result.model, as in {right}.")
    if not isinstance(path, str | os.PathLike):
        right = call.format(path="path")
        raise FileError(f"path is a {type(path).__name__}: give a file name, as in {right}.")


def output_path(path: str | os.PathLike[str], extension: str = SAFETENSORS) -> Path:
    """Return the path as a `Path`, or raise `FileError` if the file could not be written there.

    A safetensors file may have any extension that does not belong to another format. Files of
    other formats must have their own.
    """
    target = Path(path)
    found = target.suffix.lower()
    if extension == SAFETENSORS and found in _OTHER_FORMATS:
        raise FileError(
            f"'{target}' would be taken for {_OTHER_FORMATS[found]}, and lobs writes safetensors: "
            f"name it '{target.with_suffix(SAFETENSORS).name}'."
        )
    if extension != SAFETENSORS and found != extension:
        right = f"{target.stem or 'network'}{extension}"
        raise FileError(f"'{target}' must end in {extension}: name it '{right}'.")
    return writable(target)


def writable(path: str | os.PathLike[str]) -> Path:
    """Return the path as a `Path`, or raise `FileError` if no file can be made there."""
    target = Path(path)
    if "\0" in str(target):
        raise FileError(f"cannot write {str(target)!r}: a name holds no null bytes. Remove them.")
    if target.is_dir():
        raise FileError(f"cannot write '{target}': it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise FileError(
            f"cannot write '{target}': there is no folder '{target.parent}'. Make it first."
        )
    if not os.access(target.parent, os.W_OK):
        raise FileError(
            f"cannot write '{target}': the folder '{target.parent}' is read-only. Choose another."
        )
    return target
