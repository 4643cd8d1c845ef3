"""Merge low-rank adapters into pruned weights without filling their zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import MaskError
from lobs.training.hold import apply_masks


@torch.no_grad()
def merge_lora(
    weight: Tensor, down: Tensor, up: Tensor, mask: Tensor, scale: float = 1.0
) -> tuple[Tensor, float]:
    """Add scale·up@down to the kept weights; return them and the lost share of the update's energy.

    The part of the update that falls on removed weights is lost.

    Args:
        weight: the pruned weight. The product must have its shape, or its number of elements if the
            weight has more than two dimensions.
        down: the matrix A, with as many rows as the rank.
        up: the matrix B, with as many columns as the rank.
        mask: True = kept, in the weight's shape.
        scale: usually alpha over rank.
    """
    update = scale * (up @ down)
    fits = update.shape == weight.shape if weight.dim() == 2 else update.numel() == weight.numel()
    if not fits or mask.shape != weight.shape or mask.dtype != torch.bool:
        raise MaskError(
            f"a weight {tuple(weight.shape)}, its update {tuple(update.shape)} and its mask "
            f"{mask.dtype} {tuple(mask.shape)} do not fit together."
            + (
                " Is the weight stored transposed, as in GPT-2? Then pass weight.T and mask.T."
                if update.mT.shape == weight.shape
                else ""
            )
        )
    update = update.reshape(weight.shape)
    energy = float(update.double().square().sum())
    lost = float(update[~mask].double().square().sum()) / energy if energy else 0.0
    return (weight + update).masked_fill(~mask, 0).to(weight.dtype), lost


def merge_adapters(model: Any, masks: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, int]]:
    """Merge a `peft` model's adapters and zero the removed weights again.

    Return the merged network and, by tensor, the number of removed weights that the merge filled.
    What the adapters learned on removed weights is lost, so evaluate the result.
    """
    if not callable(getattr(model, "merge_and_unload", None)):
        raise MaskError(
            f"{type(model).__name__} has no merge_and_unload(); give the model that peft made."
        )
    merged: nn.Module = model.merge_and_unload()
    return merged, apply_masks(merged, masks)
