"""Leave padding out of every sum over positions.

A batch of sequences may hold an `attention_mask` of (samples, positions). Padded positions are no
data: they count neither in moments nor in distances. The masks of the batch that is running are
known here, so that hooks deep inside the network can ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lobs._system.memory import Shelved
from lobs.layers import Layer
from lobs.layers.linear import LinearLayer

Masks: TypeAlias = tuple[Tensor, ...]  # of (samples, positions), True where a position is data

_NAMES = ("attention_mask", "decoder_attention_mask")
_current: ContextVar[Masks] = ContextVar("lobs_padding", default=())


def masks_of(batch: Any) -> Masks:
    """Return the masks of a batch, one for each shape; none where nothing is padded.

    The two sides of an encoder-decoder may have one shape. A position then is data if it is in
    either of them.
    """
    if not isinstance(batch, Mapping):
        return ()
    found: dict[tuple[int, ...], Tensor] = {}
    given = [batch[name] for name in _NAMES if name in batch]
    ids = batch.get("decoder_input_ids")
    if isinstance(ids, Tensor) and "decoder_attention_mask" not in batch:
        given.append(torch.ones_like(ids))
    for mask in given:
        if isinstance(mask, Tensor) and mask.dim() == 2:
            shape = tuple(mask.shape)
            found[shape] = found[shape] | (mask != 0) if shape in found else mask != 0
    return tuple(mask for mask in found.values() if not bool(mask.all()))


def rows_of_masks(masks: Masks, rows: slice) -> Masks:
    """Return the masks of some samples."""
    return tuple(mask[rows] for mask in masks)


@contextmanager
def padded(masks: Masks) -> Iterator[None]:
    """Let these be the masks of the batch that runs inside the block."""
    token = _current.set(masks)
    try:
        yield
    finally:
        _current.reset(token)


def positions(x: Tensor | Shelved, masks: Masks | None = None) -> Tensor | None:
    """Return the mask that fits a tensor of (samples, positions, …); None: all are data."""
    for mask in _current.get() if masks is None else masks:
        if tuple(x.shape[:2]) == tuple(mask.shape):
            return mask.to(x.device) if isinstance(x, Tensor) else mask
    return None


def unpadded(layer: Layer, x: Tensor, rows: slice | None = None) -> Tensor:
    """Return a layer's input without padded positions.

    Args:
        layer: the layer. Only linear layers have features last, so others keep their input.
        x: its input. Networks may flatten samples and positions into one dimension.
        rows: samples to take; all by default.
    """
    taken = x if rows is None else x[rows]
    if not _current.get() or not isinstance(layer, LinearLayer):
        return taken
    if x.dim() > 2 and getattr(layer.module, "batch_first", True):
        mask = positions(x)
        return taken if mask is None else taken[mask if rows is None else mask[rows]]
    flat = next((m.flatten() for m in _current.get() if x.dim() == 2 and m.numel() == len(x)), None)
    return taken if flat is None else taken[(flat if rows is None else flat[rows]).to(x.device)]


def without_padding(out: Tensor) -> Tensor:
    """Return an output of (samples, positions, …) without padded positions."""
    mask = positions(out) if out.dim() > 2 else None
    return out if mask is None else out[mask]
