"""Files: a state dict in safetensors, with masks and what was done to it in the header.

Any safetensors reader can load the weights into a plain `load_state_dict`: masks are not extra
tensors. A mask is the pattern of non-zeros, plus the few kept weights that happen to be exactly
zero, which the header lists. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lobs.storage.compact import FORMAT as COMPACT
from lobs.storage.compact import CompactFile, Values, read_compact, write_compact
from lobs.errors import FileError
from lobs.storage.atomic import atomic_write

FORMAT = "lobs.storage.checkpoint"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds: the weights, the masks (True = kept) by parameter name, and the record of how they came about."""

    state_dict: dict[str, Tensor]
    masks: dict[str, Tensor]
    record: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Tensor],
    masks: Mapping[str, Tensor] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights, masks and a JSON-able record to one safetensors file, atomically.

    Refuses masks that the weights do not obey: a file never claims zeros that are not there.
    """
    tensors = _tensors(model)
    packed = {
        name: _pack(tensors[name], mask) for name, mask in _checked_masks(tensors, masks).items()
    }
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "masks": json.dumps(packed),
        "record": json.dumps(dict(record or {})),
    }
    # safetensors refuses shared storage; tied parameters are written once each.
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    unique = {
        name: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in tensors.items()
    }
    with atomic_write(path) as partial:
        try:
            save_file(unique, str(partial), metadata=header)
        except safetensors.SafetensorError as error:
            raise FileError(f"cannot write '{path}': {error}.") from error
    return Path(path)


def save_compact(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Tensor],
    masks: Mapping[str, Tensor] | None = None,
    record: Mapping[str, Any] | None = None,
    *,
    values: Values = "same",
) -> CompactFile:
    """Write what `save` writes without the zeros: each tensor in the cheapest of three codes, atomically.

    `load` gives back the same bits. With `values="float16"` or `"int8"` (a scale per output
    channel) the kept values of masked tensors are rounded; `CompactFile.tensors` says by how much
    at most.
    """
    tensors = _tensors(model)
    told = {} if values == "same" else {"values": values}
    return write_compact(
        path, tensors, _checked_masks(tensors, masks), {**(record or {}), **told}, values
    )


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file written by `save` or `save_compact`, or any safetensors file (then without masks and record)."""
    source = Path(path)
    if source.is_dir():
        raise FileError(f"'{source}' is a folder: name a safetensors file in it.")
    if not source.is_file():
        raise FileError(f"there is no file '{source}'.")
    try:
        with safetensors.safe_open(str(source), framework="pt") as file:
            header = file.metadata() or {}
        state = load_file(str(source))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FileError(
            f"'{source}' is not a readable safetensors file: {_instead(source, error)}"
        ) from error
    if header.get("format") == COMPACT:
        return Checkpoint(*read_compact(source, header, state))
    if "layout" in header or "sha256" in header:
        raise FileError(
            f"'{source}' looks like a compact file whose header is damaged: its format is "
            f"{header.get('format')!r}."
        )
    if header.get("format") != FORMAT:
        return Checkpoint(state, {})
    if header.get("version") != str(VERSION):
        raise FileError(
            f"'{source}' has format version {header.get('version')}; this lobs reads version "
            f"{VERSION}."
        )
    try:
        packed, record = json.loads(header["masks"]), json.loads(header["record"])
        if not isinstance(record, dict):
            raise TypeError("the record is not a mapping")
        masks = {name: _unpack(state[name], entry) for name, entry in packed.items()}
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        zlib.error,
        RecursionError,
        OverflowError,
    ) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise FileError(
            f"'{source}' is damaged: {what}. Copy it again, or write it anew."
        ) from error
    return Checkpoint(state, masks, record)


def _instead(source: Path, error: Exception) -> str:
    """What a file is that is no safetensors file, and what to do about it, by its first bytes."""
    try:
        with source.open("rb") as file:
            head = file.read(60)
    except OSError as refused:
        return f"{refused.strerror}. Who may read it?"
    if not head:
        return "it is empty (0 bytes). Write or fetch it again."
    pickled = (
        head[0] == 0x80 and head[1:2] <= b"\5" and head[8:9] != b"{"
    )  # there the header of a damaged file begins
    if pickled or head.startswith(b"PK\3\4"):
        what = "a pickle" if pickled else "a zip archive, as torch.save writes"
        return (
            f"it is {what}, and lobs unpickles nothing. Load it in a function of yours and name "
            "that as "
            "package.module:function, or write its weights with "
            f"lobs.save('{source.stem}.safetensors', state_dict)."
        )
    if (line := _first_line(head)) is not None:
        return f"it is text that begins '{line}'. Give what `lobs prune --out` wrote."
    return f"{error}. It is of another kind, or damaged: give what `lobs prune --out` wrote, or write or fetch it again."


def _first_line(head: bytes) -> str | None:
    """The first line of a text by its first bytes; None of what is no text."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last letter may be cut
    except UnicodeDecodeError:
        return None
    printable = all(letter.isprintable() or letter.isspace() for letter in text)
    return (text.strip().splitlines() or [""])[0] if printable else None


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    odd = [name for name, t in state.items() if not isinstance(t, Tensor)]
    if odd:
        raise FileError(
            f"'{odd[0]}' in the state dict is not a tensor; safetensors holds nothing else. Keep "
            "it elsewhere."
        )
    return {name: t.detach().cpu().contiguous() for name, t in state.items()}


def _checked_masks(
    tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Masks on the CPU, each of the right shape and obeyed by its tensor."""
    checked = {}
    for name, given in (masks or {}).items():
        if name not in tensors:
            raise FileError(f"mask '{name}' names no tensor of the state dict.")
        mask, tensor = given.detach().cpu(), tensors[name]
        if mask.shape != tensor.shape or mask.dtype != torch.bool:
            raise FileError(
                f"mask '{name}' is {mask.dtype} {tuple(mask.shape)}; it must be bool "
                f"{tuple(tensor.shape)}."
            )
        broken = int((tensor[~mask] != 0).sum())
        if broken:
            raise FileError(
                f"'{name}': {broken} weights that its mask removes are not zero. Apply the mask "
                "first."
            )
        checked[name] = mask
    return checked


def _pack(tensor: Tensor, mask: Tensor) -> dict[str, Any]:
    zeros = np.packbits((mask & (tensor == 0)).numpy().ravel())
    return {
        "kept": int(mask.sum()),
        "kept_zeros": base64.b64encode(zlib.compress(zeros.tobytes(), 9)).decode(),
    }


def _unpack(tensor: Tensor, entry: dict[str, Any]) -> Tensor:
    size = -(-tensor.numel() // 8)
    inflater = zlib.decompressobj()
    raw = inflater.decompress(base64.b64decode(entry["kept_zeros"], validate=True), size + 1)
    if len(raw) != size:
        raise ValueError(f"mask of {len(raw)} bytes where {size} are needed")
    bits = np.unpackbits(np.frombuffer(raw, np.uint8), count=tensor.numel()).astype(bool)
    mask = (tensor != 0) | torch.from_numpy(bits).view(tensor.shape)
    if int(mask.sum()) != int(entry["kept"]):
        raise ValueError(f"mask keeps {int(mask.sum())} weights, the header says {entry['kept']}")
    return mask
