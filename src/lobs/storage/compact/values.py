"""How the kept values are written: as they are, as float16, or as int8 with a scale per output channel."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.errors import FileError

Values: TypeAlias = Literal["same", "float16", "int8"]
VALUES: tuple[Values, ...] = ("same", "float16", "int8")
_STEPS = 127


def quantise(
    name: str, values: Tensor, channels: Tensor, rows: int, kind: Values
) -> dict[str, Tensor]:
    """Stored parts of a one-dimensional tensor of values, whose output channels `channels` names."""
    if kind == "same":
        return {"values": values}
    if not bool(torch.isfinite(values).all()):
        raise FileError(
            f"'{name}' holds values that are not finite; {kind} cannot store them. Export with "
            "values='same'."
        )
    if kind == "float16":
        half = values.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise FileError(
                f"'{name}' holds {values.abs().max():.3g}; float16 ends at 65504. Export with "
                "values='same'."
            )
        return {"values": half}
    wide = values.to(torch.float32)
    largest = torch.zeros(rows).scatter_reduce_(0, channels, wide.abs(), "amax")
    if not bool(torch.isfinite(largest).all()):
        raise FileError(
            f"'{name}' holds values that float32 scales cannot reach. Export with values='same'."
        )
    scale = largest / _STEPS
    step = scale[channels].clamp_min(torch.finfo(torch.float32).tiny)
    return {"values": (wide / step).round().clamp_(-_STEPS, _STEPS).to(torch.int8), "scale": scale}


def restore(parts: dict[str, Tensor], channels: Tensor, dtype: torch.dtype, kind: Values) -> Tensor:
    """Values in their first dtype again."""
    if kind == "int8":
        return (parts["values"].to(torch.float32) * parts["scale"][channels]).to(dtype)
    return parts["values"].to(dtype)


def stored_as(kind: Values, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the values part has in the file."""
    return {"same": dtype, "float16": torch.float16, "int8": torch.int8}[kind]


def worthwhile(kind: Values, dtype: torch.dtype) -> bool:
    """Whether quantising a dtype makes it smaller at all."""
    return (
        kind != "same"
        and dtype.is_floating_point
        and dtype.itemsize > stored_as(kind, dtype).itemsize
    )
