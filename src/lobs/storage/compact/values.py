"""Store kept values unchanged, as float16, or as int8 with one scale per output channel."""

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
    """Return the stored parts of a one-dimensional tensor of values.

    Args:
        name: the tensor's name, for error messages.
        values: the values to store.
        channels: the output channel of each value.
        rows: the number of output channels.
        kind: how to store them.
    """
    if kind == "same":
        return {"values": values}
    if not bool(torch.isfinite(values).all()):
        raise FileError(
            f"'{name}' holds values that are not finite; {kind} cannot store them. Use "
            "values='same'."
        )
    if kind == "float16":
        half = values.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise FileError(
                f"'{name}' holds {values.abs().max():.3g}; float16 ends at 65504. Use "
                "values='same'."
            )
        return {"values": half}
    wide = values.to(torch.float32)
    largest = torch.zeros(rows).scatter_reduce_(0, channels, wide.abs(), "amax")
    if not bool(torch.isfinite(largest).all()):
        raise FileError(
            f"'{name}' holds values that float32 scales cannot reach. Use values='same'."
        )
    scale = largest / _STEPS
    step = scale[channels].clamp_min(torch.finfo(torch.float32).tiny)
    return {"values": (wide / step).round().clamp_(-_STEPS, _STEPS).to(torch.int8), "scale": scale}


def restore(parts: dict[str, Tensor], channels: Tensor, dtype: torch.dtype, kind: Values) -> Tensor:
    """Return stored parts as values of their original dtype.

    Args:
        parts: what `quantise` returned.
        channels: the output channel of each value.
        dtype: the original dtype.
        kind: how the values were stored.
    """
    if kind == "int8":
        return (parts["values"].to(torch.float32) * parts["scale"][channels]).to(dtype)
    return parts["values"].to(dtype)


def stored_as(kind: Values, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the stored values."""
    return {"same": dtype, "float16": torch.float16, "int8": torch.int8}[kind]


def worthwhile(kind: Values, dtype: torch.dtype) -> bool:
    """Return whether storing a dtype this way makes it smaller."""
    return (
        kind != "same"
        and dtype.is_floating_point
        and dtype.itemsize > stored_as(kind, dtype).itemsize
    )
