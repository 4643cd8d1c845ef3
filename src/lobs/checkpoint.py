"""Files: a state dict in safetensors, with masks and what was done to it in the header.

Any safetensors reader can load the weights into a plain `load_state_dict`: masks are not extra tensors. A mask is the pattern
of non-zeros, plus the few kept weights that happen to be exactly zero, which the header lists. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
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

from lobs.errors import FileError

FORMAT = "lobs.checkpoint"
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
    state = model.state_dict() if isinstance(model, nn.Module) else model
    odd = [name for name, t in state.items() if not isinstance(t, Tensor)]
    if odd:
        raise FileError(f"'{odd[0]}' in the state dict is not a tensor; safetensors holds nothing else.")
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    packed = {}
    for name, mask in (masks or {}).items():
        if name not in tensors:
            raise FileError(f"mask '{name}' names no tensor of the state dict.")
        packed[name] = _pack(name, tensors[name], mask.detach().cpu())
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "masks": json.dumps(packed),
        "record": json.dumps(dict(record or {})),
    }
    # safetensors refuses shared storage; tied parameters are written once each.
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    unique = {name: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t for name, t in tensors.items()}
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
    except OSError as error:
        raise FileError(f"cannot write '{target}': {error.strerror}.") from error
    try:
        save_file(unique, partial, metadata=header)
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except (OSError, safetensors.SafetensorError) as error:
        Path(partial).unlink(missing_ok=True)
        raise FileError(f"cannot write '{target}': {error}.") from error
    return target


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file written by `save`, or any safetensors file (then without masks and record)."""
    source = Path(path)
    if not source.is_file():
        raise FileError(f"there is no file '{source}'.")
    try:
        with safetensors.safe_open(str(source), framework="pt") as file:
            header = file.metadata() or {}
        state = load_file(str(source))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FileError(f"'{source}' is not a readable safetensors file: {error}.") from error
    if header.get("format") != FORMAT:
        return Checkpoint(state, {})
    if header.get("version") != str(VERSION):
        raise FileError(f"'{source}' has format version {header.get('version')}; this lobs reads version {VERSION}.")
    try:
        packed, record = json.loads(header["masks"]), json.loads(header["record"])
        if not isinstance(record, dict):
            raise TypeError("the record is not a mapping")
        masks = {name: _unpack(state[name], entry) for name, entry in packed.items()}
    except (KeyError, ValueError, TypeError, AttributeError, zlib.error, RecursionError, OverflowError) as error:
        raise FileError(f"'{source}' has a damaged header: {error!r}.") from error
    return Checkpoint(state, masks, record)


def _pack(name: str, tensor: Tensor, mask: Tensor) -> dict[str, Any]:
    if mask.shape != tensor.shape or mask.dtype != torch.bool:
        raise FileError(f"mask '{name}' is {mask.dtype} {tuple(mask.shape)}; it must be bool {tuple(tensor.shape)}.")
    alive = tensor != 0
    broken = int((alive & ~mask).sum())
    if broken:
        raise FileError(f"'{name}': {broken} weights that its mask removes are not zero. Apply the mask first.")
    zeros = np.packbits((mask & ~alive).numpy().ravel())
    return {"kept": int(mask.sum()), "kept_zeros": base64.b64encode(zlib.compress(zeros.tobytes(), 9)).decode()}


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
