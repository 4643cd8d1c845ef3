"""Estimate the header of a compact file before the file is written."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from lobs.storage.compact.file import FORMAT, VERSION
from lobs.storage.compact.tensors import PART_BYTES, Entry

_LENGTH, _PADDING = 8, 7  # bytes of the header's own length, and spaces behind the header at most
_HASH = 64  # digits of a SHA-256
_FEW_PARTS, _MOST_PARTS = ("values", "gaps"), ("top", "rest", "gaps")  # of a masked tensor


def header_without_record(tensors: Mapping[str, Tensor], masked: Container[str]) -> int:
    """Return about how many bytes layout, index and hash take, and rarely fewer than they take.

    Args:
        tensors: the state dict; only shapes and types are read.
        masked: names of the tensors from which weights are removed.
    """
    end = sum(t.numel() * t.element_size() for t in tensors.values())
    layout: dict[str, Any] = {}
    index: dict[str, Any] = {}
    parts: dict[str, tuple[int, ...]]
    for name, tensor in tensors.items():
        count, shape = tensor.numel(), tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name in masked:
            entry = Entry(shape, dtype, "gaps", "planes", count, 0, "stored")
            some = _MOST_PARTS if count > PART_BYTES else _FEW_PARTS  # splitting must pay
            parts = {f"{name}:{part}": (count,) for part in some}
        else:
            entry = Entry(shape, dtype, "dense", "same", count, 0, "none")
            parts = {name: shape}
        layout[name] = entry.to_json()
        for key, form in parts.items():
            index[key] = {"dtype": "F32", "shape": form, "data_offsets": (end, end)}
    fields = {"format": FORMAT, "version": str(VERSION), "sha256": _HASH * "0", "record": ""}
    fields["layout"] = _short(layout)
    return _LENGTH + len(_short({"__metadata__": fields, **index})) + _PADDING


def _short(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))
