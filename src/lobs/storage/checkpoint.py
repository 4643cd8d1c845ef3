"""Save and load state dicts as safetensors, with masks and a record in the header.

Any safetensors reader can load the weights into a plain `load_state_dict`: masks are not extra
tensors. A mask is the pattern of non-zeros, plus the kept weights that are exactly zero. The header
lists those. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
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

from lobs.errors import FileError
from lobs.storage.atomic import atomic_write
from lobs.storage.compact import FORMAT as COMPACT
from lobs.storage.compact import CompactFile, Values, digest_of, read_compact, write_compact
from lobs.storage.foreign import describe
from lobs.storage.outputs import check_order, output_path

FORMAT = "lobs.storage.checkpoint"
VERSION = 2  # version 1 has no checksum; it is still read
_FORMER = "lobs.checkpoint"  # of the first networks that shipped: weights alone are read
_OURS = {"version", "masks", "record", "sha256", "layout"}  # fields that other programs lack
_DAMAGE = (
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    zlib.error,
    RecursionError,
    OverflowError,
)


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """Hold what a file contains.

    `state_dict` has the weights. `masks` has, by parameter name, True where a weight is kept.
    `record` says how the weights came about.
    """

    state_dict: dict[str, Tensor]
    masks: dict[str, Tensor]
    record: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        numbers = sum(tensor.numel() for tensor in self.state_dict.values())
        known = f", record of {', '.join(self.record)}" if self.record else ""
        return (
            f"Checkpoint({len(self.state_dict)} tensors with {numbers:,} numbers, "
            f"{len(self.masks)} masks{known})"
        )


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    masks: Mapping[str, Tensor] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights, masks and a record to one safetensors file, atomically; return its path.

    Masks that the weights do not obey are refused: a file never claims zeros that are not there.

    Args:
        model: the network, or its state dict.
        path: the file to write; its folder must exist. The usual extension is `.safetensors`.
        masks: True = kept, by parameter name.
        record: how the weights came about; anything that JSON can hold.
    """
    check_order(model, path, "lobs.save(model, {path})")
    target = output_path(path)
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
    header["sha256"] = digest_of(header, tensors)
    # safetensors refuses shared storage, so tied parameters are written once each.
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    unique = {
        name: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in tensors.items()
    }
    with atomic_write(target) as partial:
        try:
            save_file(unique, str(partial), metadata=header)
        except safetensors.SafetensorError as error:
            raise FileError(f"cannot write '{target}': {error}.") from error
    return target


def save_compact(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    masks: Mapping[str, Tensor] | None = None,
    record: Mapping[str, Any] | None = None,
    *,
    values: Values = "same",
) -> CompactFile:
    """Write what `save` writes, but without the zeros, atomically; return the file's sizes.

    Each tensor is stored in the cheapest of three codes. `load` gives back the same bits.

    Args:
        model: the network, or its state dict.
        path: the file to write; its folder must exist. The usual extension is `.safetensors`.
        masks: True = kept, by parameter name.
        record: how the weights came about; anything that JSON can hold.
        values: "same" keeps every bit. "float16" and "int8" (one scale per output channel) round
            the kept values of masked tensors. `CompactFile.tensors` has the largest error of each.
    """
    check_order(model, path, "lobs.storage.save_compact(model, {path})")
    target = output_path(path)
    tensors = _tensors(model)
    rounding = {} if values == "same" else {"values": values}
    return write_compact(
        target, tensors, _checked_masks(tensors, masks), {**(record or {}), **rounding}, values
    )


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file that `save` or `save_compact` wrote, or any other safetensors file.

    Files of other programs come back without masks and record.
    """
    source = Path(path)
    if source.is_dir():
        raise FileError(f"'{source}' is a folder: name a safetensors file in it.")
    if not source.is_file():
        raise FileError(f"there is no file '{source}'.")
    try:
        with safetensors.safe_open(str(source), framework="pt") as file:
            header = file.metadata() or {}
        state = load_file(str(source))
    except (OSError, *_DAMAGE, safetensors.SafetensorError) as error:
        raise FileError(
            f"'{source}' is not a readable safetensors file: {describe(source, error)}"
        ) from error
    if header.get("format") == COMPACT:
        return Checkpoint(*read_compact(source, header, state))
    if header.get("format") != FORMAT:
        if _OURS & header.keys() and header.get("format") != _FORMER:
            raise FileError(
                f"'{source}' looks like a file of lobs whose header is damaged: its format is "
                f"{header.get('format')!r}. Copy it again, or write it anew."
            )
        return Checkpoint(state, {})
    state = _checked(source, header, state)
    try:
        packed, record = json.loads(header["masks"]), json.loads(header["record"])
        if not isinstance(record, dict):
            raise TypeError("the record is not a mapping")
        masks = {name: _unpack(state[name], entry) for name, entry in packed.items()}
    except _DAMAGE as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise FileError(
            f"'{source}' is damaged: {what}. Copy it again, or write it anew."
        ) from error
    return Checkpoint(state, masks, record)


def _checked(
    source: Path, header: Mapping[str, str], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a file of a known version whose content has the stated hash."""
    version, stated = header.get("version"), header.get("sha256")
    if version not in ("1", str(VERSION)):
        raise FileError(
            f"'{source}' has format version {version}; this lobs reads versions 1 and {VERSION}."
        )
    if version == "1" and stated is None:
        return dict(state)
    # safetensors gives views of the file on disk. A copy stays as hashed, even if the file changes.
    state = {name: tensor.clone() for name, tensor in state.items()}
    if stated != digest_of(header, state):
        raise FileError(
            f"'{source}' is damaged: its content does not have the hash that its header states. "
            "Copy it again, or write it anew."
        )
    return state


def packed_masks(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> str:
    """Return the masks of some tensors as text for a header; weights that disobey are refused."""
    own = {name: mask for name, mask in masks.items() if name in tensors}
    checked = _checked_masks(tensors, own)
    return json.dumps({name: _pack(tensors[name], mask) for name, mask in checked.items()})


def unpacked_masks(tensors: Mapping[str, Tensor], text: str, where: object) -> dict[str, Tensor]:
    """Return the masks that `packed_masks` wrote.

    Args:
        tensors: the tensors of the file, by name.
        text: what the header holds.
        where: the file, for messages.
    """
    try:
        return {name: _unpack(tensors[name], entry) for name, entry in json.loads(text).items()}
    except _DAMAGE as error:
        raise FileError(
            f"'{where}' is damaged: its masks do not fit ({error}). Copy it again, or write it "
            "anew."
        ) from error


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict on the CPU. Anything that is not a tensor is refused."""
    if not isinstance(model, nn.Module | Mapping):
        raise FileError(f"model is a {type(model).__name__}: give a network or a state dict.")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    odd = [name for name, t in state.items() if not isinstance(t, Tensor)]
    if odd:
        raise FileError(
            f"'{odd[0]}' in the state dict is not a tensor, and safetensors holds nothing else. "
            "Keep it elsewhere."
        )
    return {name: t.detach().cpu().contiguous() for name, t in state.items()}


def _checked_masks(
    tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the masks on the CPU. Wrong shapes and weights that disobey are refused."""
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
    """Encode a mask as its count and a bit for every kept weight that is exactly zero."""
    zeros = np.packbits((mask & (tensor == 0)).numpy().ravel())
    return {
        "kept": int(mask.sum()),
        "kept_zeros": base64.b64encode(zlib.compress(zeros.tobytes(), 9)).decode(),
    }


def _unpack(tensor: Tensor, entry: dict[str, Any]) -> Tensor:
    """Decode what `_pack` made; raise `ValueError` where it contradicts the tensor."""
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
