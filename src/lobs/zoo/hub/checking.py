"""Check a pruned folder: masks, counts and digests, one shard at a time. Needs no transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from lobs.certificate.verify import Finding, verify_masks
from lobs.errors import FileError
from lobs.storage.checkpoint import Checkpoint
from lobs.storage.shards import Shards
from lobs.zoo.hub.record import RECORD, digest, read_record


def masks(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the masks of a pruned folder: True where a weight is kept, by parameter name.

    The names are those of the loaded network, also where transformers stores tensors under others.
    """
    shards, names = Shards(folder), read_record(Path(folder)).get("names", {})
    found = {name: mask for file in shards.files for name, mask in shards.masks(file)[1].items()}
    return {names.get(name, name): mask for name, mask in found.items()}


def verify(folder: str | os.PathLike[str]) -> list[Finding]:
    """Check that removed weights are zero, and that counts and files are those recorded."""
    path = Path(folder)
    record, shards = read_record(path), Shards(path)
    if not record:
        raise FileError(f"'{path}' holds no {RECORD}: give a folder that lobs has pruned.")
    found = _same_files(path, record, shards)
    rows: list[Any] = record.get("layers", [])
    parts: dict[str, list[str]] = record.get("parts", {})
    joined = [row for row in rows if any(row["parameters"].keys() & set(o) for o in parts.values())]
    seen, removed = {row["name"] for row in joined}, 0
    counted = {*parts, *(name for row in joined for name in row["parameters"])}
    alone = [row for row in rows if row["name"] not in seen]
    for file in shards.files:
        tensors, own = (_renamed(part, record) for part in shards.masks(file))
        removed += sum(int((~mask).sum()) for name, mask in own.items() if name in counted)
        here = [row for row in alone if own.keys() & set(row.get("parameters", ()))]
        seen |= {row["name"] for row in here}
        part = {"layers": here, "settings": record.get("settings", {})}
        found += verify_masks(Checkpoint(tensors, own, part))
    if joined:
        wanted = sum(int(row["total"]) - int(row["kept"]) for row in joined)
        text = f"removed {removed:,}, recorded {wanted:,}"
        found.append(Finding(f"count of {len(parts):,} joined tensors", removed == wanted, text))
    lost = [row["name"] for row in rows if row["parameters"] and row["name"] not in seen]
    found += [Finding(f"masks {name}", False, "the folder holds no mask of it") for name in lost]
    kept = sum(int(row["kept"]) for row in rows)
    found.append(
        Finding("all layers", kept == record.get("kept"), f"kept {kept:,} of {record['total']:,}")
    )
    return found


def _renamed(tensors: dict[str, Tensor], record: dict[str, Any]) -> dict[str, Tensor]:
    names = record.get("names", {})
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def _same_files(folder: Path, record: dict[str, Any], shards: Shards) -> list[Finding]:
    listed: dict[str, str] = record.get("files", {})
    found = []
    for file in sorted({*listed, *shards.files}):
        there = (folder / file).is_file() and Path(file).name == file
        same = there and digest(folder / file) == listed.get(file)
        found.append(
            Finding(f"file {file}", same, "as it was written" if same else "changed or missing")
        )
    return found
