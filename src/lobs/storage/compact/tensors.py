"""Encode one tensor as stored parts with an entry that describes them, and decode it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from lobs.errors import FileError
from lobs.storage.compact import planes
from lobs.storage.compact.codes import (
    Positions,
    gap_width,
    pack_bits,
    pack_gaps,
    unpack_bits,
    unpack_gaps,
)
from lobs.storage.compact.values import Values, quantise, restore, stored_as, worthwhile

Code: TypeAlias = Literal["dense", "bits", "gaps"]
MaskKind: TypeAlias = Literal["none", "full", "stored", "own"]
Stored: TypeAlias = Literal["same", "float16", "int8", "planes"]
Parts: TypeAlias = dict[str, Tensor]

PARTS = ("values", "scale", "top", "rest", "bits", "gaps", "mask")
PART_BYTES = 100  # about what one more part costs in the file's header
# A decoded tensor has at most _GROWTH bytes for each stored byte, plus _FREE_BYTES.
_GROWTH, _FREE_BYTES = 1024, 2**16
_PIECE = 2**22  # elements checked at once: checking takes little memory
_LARGEST = 2**48  # no shape, count or width in a header may exceed this

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        *(
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.uint16,
            torch.uint32,
            torch.uint64,
        ),
        *(torch.bool, torch.complex64),
    )
}


@dataclass(frozen=True)
class Entry:
    """Describe how a tensor is stored.

    `count` values lie at the positions that `code` gives. `mask` says how the mask is found.
    """

    shape: tuple[int, ...]
    dtype: str
    code: Code
    values: Stored
    count: int
    width: int
    mask: MaskKind

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of output channels. Each has its own scale where values are int8."""
        return self.shape[0] if self.shape else 1

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the header holds it."""
        return asdict(self)


def entry_from_json(raw: Any) -> Entry:
    """Return an entry of a file's header; raise `ValueError` if it is malformed."""
    if (
        not isinstance(raw, dict)
        or set(raw) != set(Entry.__dataclass_fields__)
        or not isinstance(raw["shape"], list)
    ):
        raise ValueError("an entry does not have the fields it must have")
    for number in (*raw["shape"], raw["count"], raw["width"]):
        if type(number) is not int or not 0 <= number <= _LARGEST:
            raise ValueError(f"{number!r} is not a size")
    known = {
        "dtype": DTYPES,
        "code": get_args(Code),
        "values": get_args(Stored),
        "mask": get_args(MaskKind),
    }
    for field, choices in known.items():
        if not isinstance(raw[field], str) or raw[field] not in choices:
            raise ValueError(f"unknown {field} {raw[field]!r}")
    entry = Entry(**{**raw, "shape": tuple(raw["shape"])})
    if len(entry.shape) > 64 or entry.size > _LARGEST or entry.count > entry.size:
        raise ValueError(f"{entry.count} values in a tensor of shape {entry.shape}")
    return entry


def encode(name: str, tensor: Tensor, mask: Tensor | None, kind: Values) -> tuple[Entry, Parts]:
    """Encode a tensor in the cheapest of the three codes. Only masked tensors are quantised.

    Args:
        name: the tensor's name, for error messages.
        tensor: a contiguous tensor on the CPU.
        mask: True = kept, or None.
        kind: how to store the kept values.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise FileError(f"'{name}' is {tensor.dtype}, which compact files do not hold.")
    kind = kind if mask is not None and worthwhile(kind, tensor.dtype) else "same"
    flat = tensor.reshape(-1)
    # Compare bit patterns with zero, not values, because a negative zero must survive.
    alive = flat.view(torch.uint8).reshape(len(flat), -1).any(dim=1) if len(flat) else flat.bool()
    kept = alive if mask is None else alive | mask.reshape(-1)
    positions = np.flatnonzero(kept.numpy())
    width, gap_bytes = gap_width(positions)
    item = stored_as(kind, tensor.dtype).itemsize
    one_bit_each = -(-len(flat) // 8) + PART_BYTES
    holes = mask is not None and not bool(mask.all())  # beside dense values the mask is stored too
    costs: dict[Code, int] = {
        "dense": len(flat) * item + (one_bit_each if holes else 0),
        "bits": one_bit_each + len(positions) * item,
    }
    gaps = gap_bytes + len(positions) * item
    if len(flat) * tensor.element_size() <= _allowed(gaps):
        costs["gaps"] = gaps + PART_BYTES
    code = min(costs, key=lambda c: costs[c])
    if code == "dense":
        positions = np.arange(len(flat))
    shape = tuple(tensor.shape)
    how = _mask_kind(code, kept, mask)
    entry = Entry(shape, dtype, code, kind, len(positions), width if code == "gaps" else 0, how)
    parts = _parts(name, entry, flat, positions, mask)
    return _with_planes(entry, parts)


def _parts(
    name: str, entry: Entry, flat: Tensor, positions: Positions, mask: Tensor | None
) -> Parts:
    parts: Parts = {}
    if entry.code == "bits":
        parts["bits"] = torch.from_numpy(pack_bits(positions, entry.size))
    if entry.code == "gaps":
        parts["gaps"] = torch.from_numpy(pack_gaps(positions, entry.width))
    if entry.mask == "own" and mask is not None:
        parts["mask"] = torch.from_numpy(np.packbits(mask.reshape(-1).numpy()))
    where = torch.from_numpy(positions)
    assert entry.values != "planes"  # chosen later, when its saving is known
    return parts | quantise(name, flat[where], _channels(where, entry), entry.rows, entry.values)


def _with_planes(entry: Entry, parts: Parts) -> tuple[Entry, Parts]:
    """Split values into byte planes where that is smaller. Dense tensors stay plain."""
    if (
        entry.values != "same"
        or entry.code == "dense"
        or not DTYPES[entry.dtype].is_floating_point
        or entry.count == 0
    ):
        return entry, parts
    if DTYPES[entry.dtype].itemsize == 1:
        return entry, parts
    split = planes.split(parts["values"])
    if len(split["top"]) + PART_BYTES >= entry.count:
        return entry, parts
    return replace(entry, values="planes"), {
        part: t for part, t in parts.items() if part != "values"
    } | split


def part_shapes(entry: Entry) -> dict[str, tuple[torch.dtype, int | None]]:
    """Return the parts an entry must have, with dtype and length. None is a length not known."""
    dtype = DTYPES[entry.dtype]
    byte = -(-entry.size // 8)
    needed: dict[str, tuple[torch.dtype, int | None]]
    if entry.values == "planes":
        needed = {
            "top": (torch.uint8, None),
            "rest": (torch.uint8, entry.count * (dtype.itemsize - 1)),
        }
    else:
        needed = {"values": (stored_as(entry.values, dtype), entry.count)}
    if entry.values == "int8":
        needed["scale"] = (torch.float32, entry.rows)
    if entry.code != "dense":
        needed[entry.code] = (torch.uint8, byte if entry.code == "bits" else None)
    if entry.mask == "own":
        needed["mask"] = (torch.uint8, byte)
    return needed


def check_sizes(entry: Entry, parts: Parts) -> None:
    """Raise `ValueError` for parts that `encode` could not have made. Nothing is allocated."""
    needed = part_shapes(entry)
    if set(parts) != set(needed):
        raise ValueError(f"its parts are {sorted(parts)}, not {sorted(needed)}")
    for part, (dtype, length) in needed.items():
        found = parts[part]
        if (
            found.dtype != dtype
            or found.dim() != 1
            or (length is not None and len(found) != length)
        ):
            raise ValueError(
                f"its {part} are {found.dtype} {tuple(found.shape)}, not {dtype} of length {length}"
            )
    stored = sum(p.numel() * p.element_size() for p in parts.values())
    dtype = DTYPES[entry.dtype]
    if entry.size * dtype.itemsize > _allowed(stored):
        raise ValueError(f"{stored} bytes claim to hold a tensor of shape {entry.shape}")
    if entry.values == "planes":
        possible = entry.code != "dense" and dtype.is_floating_point and dtype.itemsize > 1
    else:
        possible = entry.values == "same" or worthwhile(entry.values, dtype)
    if not possible:
        raise ValueError(f"{entry.dtype} cannot be stored as {entry.values}")
    if entry.code == "dense" and entry.count != entry.size:
        raise ValueError("a dense tensor must have all its values")
    if entry.mask == ("stored" if entry.code == "dense" else "full"):
        raise ValueError(f"a mask cannot be '{entry.mask}' where values are {entry.code}")


def decode(entry: Entry, parts: Parts) -> tuple[Tensor, Tensor | None]:
    """Return the tensor and its mask; raise `ValueError` where the parts contradict the entry.

    Call `check_sizes` first.
    """
    dtype, size = DTYPES[entry.dtype], entry.size
    where = torch.from_numpy(_positions(entry, parts))
    if len(where) != entry.count:
        raise ValueError(f"{len(where)} positions for {entry.count} values")
    if (
        entry.values == "same"
        and dtype == torch.bool
        and bool((parts["values"].view(torch.uint8) > 1).any())
    ):
        raise ValueError("a boolean is neither 0 nor 1")
    if entry.values == "planes":
        values = planes.join(parts, entry.count, dtype)
    else:
        values = restore(parts, _channels(where, entry), dtype, entry.values)
    if entry.code == "dense":
        flat = values
    else:
        raw = torch.zeros(size, dtype.itemsize, dtype=torch.uint8)
        raw[where] = values.contiguous().view(torch.uint8).reshape(entry.count, dtype.itemsize)
        flat = raw.reshape(-1).view(dtype)
    tensor = flat.reshape(entry.shape)
    return tensor, _mask(entry, parts, tensor, where)


def _positions(entry: Entry, parts: Parts) -> Positions:
    if entry.code == "bits":
        return unpack_bits(parts["bits"].numpy(), entry.size)
    if entry.code == "gaps":
        return unpack_gaps(parts["gaps"].numpy(), entry.count, entry.width, entry.size)
    return np.arange(entry.size)


def _mask(entry: Entry, parts: Parts, tensor: Tensor, where: Tensor) -> Tensor | None:
    if entry.mask == "none":
        return None
    if entry.mask == "full":
        return torch.ones(entry.shape, dtype=torch.bool)
    kept = (
        where
        if entry.mask == "stored"
        else torch.from_numpy(unpack_bits(parts["mask"].numpy(), entry.size))
    )
    mask = torch.zeros(entry.size, dtype=torch.bool)
    mask[kept] = True
    mask = mask.reshape(entry.shape)
    flat: tuple[Any, Any] = tensor.reshape(-1), mask.reshape(-1)
    pieces = zip(*(part.split(_PIECE) for part in flat), strict=True)
    if any(bool(((values != 0) & ~kept).any()) for values, kept in pieces):
        raise ValueError("its mask removes weights that are not zero")
    return mask


def _mask_kind(code: Code, kept: Tensor, mask: Tensor | None) -> MaskKind:
    if mask is None:
        return "none"
    flat = mask.reshape(-1)
    if code != "dense":
        return "stored" if torch.equal(flat, kept) else "own"
    return "full" if bool(flat.all()) else "own"


def _channels(positions: Tensor, entry: Entry) -> Tensor:
    return positions // max(1, entry.size // max(1, entry.rows))


def _allowed(stored: int) -> int:
    """Return how many bytes a reader may allocate for this many stored ones."""
    return _GROWTH * stored + _FREE_BYTES
