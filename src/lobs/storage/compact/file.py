"""Write and read compact files: safetensors files whose tensors are encoded parts.

The header has the layout, the record and a hash. The hash covers format, version, layout, record
and every part, so damage is noticed. It cannot stop a hostile writer, who can compute hashes too.
The layout is therefore checked against the stored bytes before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from lobs.errors import FileError
from lobs.storage.atomic import atomic_write
from lobs.storage.compact.tensors import (
    PARTS,
    Entry,
    Parts,
    check_sizes,
    decode,
    encode,
    entry_from_json,
)
from lobs.storage.compact.values import VALUES, Values

FORMAT = "lobs.storage.compact"
VERSION = 1
_DAMAGE = (
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    IndexError,
    MemoryError,
    RuntimeError,
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's bytes in the file, and the largest rounding error of its values."""

    name: str
    shape: tuple[int, ...]
    kept: int
    total: int
    code: str
    values: str
    position_bytes: int
    value_bytes: int
    dense_bytes: int
    largest_error: float

    @property
    def stored_bytes(self) -> int:
        """Bytes of positions and values together."""
        return self.position_bytes + self.value_bytes


@dataclass(frozen=True, repr=False)
class CompactFile:
    """A written file. The bytes of its tensors and its header add up to the file size."""

    path: Path
    tensors: tuple[StoredTensor, ...]
    header_bytes: int

    def __repr__(self) -> str:
        return (
            f"CompactFile('{self.path}', {len(self.tensors)} tensors, {self.file_bytes:,} bytes, "
            f"{self.dense_bytes:,} dense)"
        )

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header_bytes + sum(t.stored_bytes for t in self.tensors)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tensors with all their zeros, without a header."""
        return sum(t.dense_bytes for t in self.tensors)


def write_compact(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    record: Mapping[str, Any],
    values: Values = "same",
) -> CompactFile:
    """Write tensors and their masks. `lobs.storage.save_compact` checks the masks and calls this.

    Args:
        path: the file to write.
        tensors: the state dict.
        masks: True = kept, by parameter name.
        record: anything that JSON can hold.
        values: how the kept values of masked tensors are stored.
    """
    if values not in VALUES:
        raise FileError(f"values='{values}' is unknown. There are: {', '.join(VALUES)}.")
    layout, parts, rows = {}, {}, []
    for name, tensor in tensors.items():
        entry, own = encode(name, tensor.detach().cpu().contiguous(), masks.get(name), values)
        layout[name] = entry.to_json()
        parts[name] = own
        rows.append(_sizes(name, entry, own, tensor, masks.get(name)))
    stored = _named(parts, layout)
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "layout": _json(layout),
        "record": _json(dict(record)),
    }
    header["sha256"] = digest_of(header, stored)
    with atomic_write(path) as partial:
        try:
            save_file(stored, str(partial), metadata=header)
        except safetensors.SafetensorError as error:
            raise FileError(f"cannot write '{path}': {error}.") from error
        size = partial.stat().st_size
    return CompactFile(Path(path), tuple(rows), size - sum(row.stored_bytes for row in rows))


def read_compact(
    source: Path, header: Mapping[str, str], stored: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Decode a file's header and tensors to state dict, masks and record.

    Args:
        source: the file, for error messages.
        header: the safetensors metadata.
        stored: the safetensors tensors.
    """
    if header.get("version") != str(VERSION):
        raise FileError(
            f"'{source}' has format version {header.get('version')}; this lobs reads version "
            f"{VERSION}."
        )
    # safetensors gives views of the file on disk. A copy stays as hashed, even if the file changes.
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    if header.get("sha256") != digest_of(header, stored):
        raise FileError(
            f"'{source}' is damaged: its content does not have the hash that its header states. "
            "Copy it again."
        )
    try:
        layout, record = json.loads(header["layout"]), json.loads(header["record"])
        if not isinstance(record, dict):
            raise TypeError("the record is not a mapping")
        entries = {name: entry_from_json(raw) for name, raw in layout.items()}
        parts = {name: _parts_of(name, entry, stored) for name, entry in entries.items()}
        if sum(map(len, parts.values())) != len(stored):
            raise ValueError("there are tensors that belong to no entry")
        for name, entry in entries.items():
            check_sizes(entry, parts[name])
        decoded = {name: decode(entry, parts[name]) for name, entry in entries.items()}
    except _DAMAGE as error:
        raise FileError(
            f"'{source}' is a compact file with a damaged layout: {error!r}."
        ) from error
    masks = {name: mask for name, (_, mask) in decoded.items() if mask is not None}
    return {name: tensor for name, (tensor, _) in decoded.items()}, masks, record


def _named(parts: Mapping[str, Parts], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name every part. Tensors stored whole keep name and shape, so that any reader finds them."""
    stored: dict[str, Tensor] = {}
    for name, own in parts.items():
        for part, tensor in own.items():
            key, value = f"{name}:{part}", tensor
            if part == "values" and _plain(layout[name]["code"], layout[name]["values"]):
                key, value = name, tensor.reshape(layout[name]["shape"])
            if key in stored:
                raise FileError(
                    f"two tensors would be stored as '{key}'. Rename the one called '{name}'."
                )
            stored[key] = value.contiguous()
    return stored


def _parts_of(name: str, entry: Entry, stored: Mapping[str, Tensor]) -> Parts:
    own = {part: stored[key] for part in PARTS if (key := f"{name}:{part}") in stored}
    if _plain(entry.code, entry.values):
        whole = stored[name]
        if tuple(whole.shape) != entry.shape or "values" in own:
            raise ValueError(
                f"'{name}' is stored as {tuple(whole.shape)}, announced as {entry.shape}"
            )
        own["values"] = whole.reshape(-1)
    return own


def _plain(code: str, values: str) -> bool:
    return code == "dense" and values == "same"


def _sizes(
    name: str, entry: Entry, parts: Parts, tensor: Tensor, mask: Tensor | None
) -> StoredTensor:
    sizes = {part: t.numel() * t.element_size() for part, t in parts.items()}
    value_bytes = sum(
        size for part, size in sizes.items() if part in ("values", "scale", "top", "rest")
    )
    moved = 0.0
    if entry.values in ("float16", "int8") and entry.size:
        moved = float(
            (decode(entry, parts)[0].double() - tensor.detach().cpu().double()).abs().max()
        )
    return StoredTensor(
        name=name,
        shape=entry.shape,
        kept=entry.size if mask is None else int(mask.sum()),
        total=entry.size,
        code=entry.code,
        values=entry.dtype if entry.values in ("same", "planes") else entry.values,
        position_bytes=sum(sizes.values()) - value_bytes,
        value_bytes=value_bytes,
        dense_bytes=tensor.numel() * tensor.element_size(),
        largest_error=moved,
    )


def _json(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


def digest_of(header: Mapping[str, str], stored: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's fields and tensors, with their names, types and shapes."""
    digest = hashlib.sha256()
    for field in ("format", "version", "layout", "masks", "record"):
        if field not in header:
            continue
        text = header[field].encode()
        digest.update(f"{field}:{len(text)}:".encode() + text)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
