"""Say what a file is that is not a safetensors file, and what to do about it."""

from __future__ import annotations

import codecs
from pathlib import Path

_PICKLE = 0x80  # the first byte of every pickle of protocol 2 or later


def describe(source: Path, error: Exception) -> str:
    """Name a file's format by its first bytes, with the remedy. `error` is the reader's own."""
    try:
        with source.open("rb") as file:
            head = file.read(60)
    except OSError as refused:
        return f"{refused.strerror}. Check who may read it."
    if not head:
        return "it is empty (0 bytes). Write or fetch it again."
    # A damaged safetensors file may begin with the same byte, but its header begins at byte 8.
    pickled = head[0] == _PICKLE and head[1:2] <= b"\5" and head[8:9] != b"{"
    if pickled or head.startswith(b"PK\3\4"):
        what = "a pickle" if pickled else "a zip archive, as torch.save writes"
        return (
            f"it is {what}, and lobs unpickles nothing. Load it in a function of your own and give "
            "package.module:function instead, or write its weights with "
            f"lobs.save(state_dict, '{source.stem}.safetensors')."
        )
    if (line := _first_line(head)) is not None:
        return f"it is text that begins '{line}'. Give a file that `lobs prune --out` wrote."
    return (
        f"{error}. It has another format or is damaged: give a file that `lobs prune --out` wrote, "
        "or write or fetch it again."
    )


def _first_line(head: bytes) -> str | None:
    """Return the first line of a text file, or None if the bytes are not text."""
    try:
        # Incremental, because the last character may be cut in the middle.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return None
    printable = all(letter.isprintable() or letter.isspace() for letter in text)
    return (text.strip().splitlines() or [""])[0] if printable else None
