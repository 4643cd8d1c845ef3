"""Merge low-rank adapters into pruned weights without filling their zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import MaskError
from lobs.layers.hooks import after_forward, watching
from lobs.training.hold import apply_masks

_PEFT = "base_model.model."  # what peft puts before a network's own names


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


@contextmanager
def hold_adapters(model: Any, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Keep a `peft` model's LoRA updates off removed weights while the block runs.

    The network then trains as it will be once it is merged, and `merge_adapters` loses nothing.

    Args:
        model: the model that peft made.
        masks: True = kept, by name in the network below peft.
    """
    found: list[tuple[nn.Module, Callable[..., Tensor]]] = []
    for path, module in model.named_modules():
        mask = masks.get(f"{path.removeprefix(_PEFT)}.weight")
        if mask is None or not hasattr(module, "lora_A"):
            continue
        if any(getattr(part, "p", 0) for part in module.lora_dropout.values()):
            raise MaskError(
                f"'{path}' has dropout before its adapter, so its update cannot be masked: use "
                "LoraConfig(lora_dropout=0.0)."
            )
        flipped = bool(getattr(module, "fan_in_fan_out", False))  # GPT-2 stores weights transposed
        found.append((module, partial(_without_removed, mask.mT if flipped else mask)))
    if not found:
        raise MaskError("no adapter lies on a pruned weight: give the peft model and its masks.")
    with watching(after_forward(module, hook) for module, hook in found):
        yield


def _without_removed(mask: Tensor, module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Take what falls on removed weights out of a LoRA layer's output."""
    if module.disable_adapters or module.merged:
        return out
    for name in module.active_adapters:
        if name in module.lora_A:
            down, up = module.lora_A[name].weight, module.lora_B[name].weight
            lost = (up @ down).masked_fill(mask.to(up.device), 0) * module.scaling[name]
            out = out - nn.functional.linear(args[0].to(lost.dtype), lost).to(out.dtype)
    return out
