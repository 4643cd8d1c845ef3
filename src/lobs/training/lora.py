"""Low-rank adapters merged into pruned weights without filling their zeros."""

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
    """W + scale·up@down on the kept weights; also the share of the update's energy that fell on removed ones and is lost.

    Args:
        weight: the pruned weight; the product must have its shape, or as many elements where it has
            more than two dimensions.
        down: A, of rank rows.
        up: B, of rank columns.
        mask: True = kept, in the weight's shape.
        scale: usually alpha over rank.
    """
    update = scale * (up @ down)
    fits = update.shape == weight.shape if weight.dim() == 2 else update.numel() == weight.numel()
    if not fits or mask.shape != weight.shape or mask.dtype != torch.bool:
        raise MaskError(
            f"a weight {tuple(weight.shape)}, its update {tuple(update.shape)} and its mask "
            f"{mask.dtype} {tuple(mask.shape)} "
            f"do not fit together."
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
    """Merge a `peft` model's adapters and zero what the merge filled; also how many weights of each tensor that were.

    Adapters trained without regard for the mask lose what they learned on removed weights: check
    the result.
    """
    if not callable(getattr(model, "merge_and_unload", None)):
        raise MaskError(
            f"{type(model).__name__} has no merge_and_unload(); give the model that peft made."
        )
    merged: nn.Module = model.merge_and_unload()
    return merged, apply_masks(merged, masks)
