"""From scores to masks with exact counts, whatever the ties."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lobs.errors import TargetError
from lobs.targets import NByM


def removal_order(scores: Tensor, protected: int = 0) -> Tensor:
    """Flat positions from the least to the most important, without the last `protected` columns.

    Ties go in order of position, so results repeat.
    """
    grid = torch.arange(scores.numel(), device=scores.device).view(scores.shape)
    free = grid[..., : scores.shape[-1] - protected].flatten()
    return free[torch.sort(scores.flatten()[free], stable=True).indices]


def joined(masks: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both sets of masks by name; where both speak of one parameter, what either removes is removed."""
    both = {name: masks[name] & more[name] for name in masks.keys() & more.keys()}
    return {**masks, **more, **both}


def mask_from_order(order: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Keep everything but the first `count` positions of an order of removal."""
    total = int(torch.Size(shape).numel())
    if not 0 <= count <= len(order):
        raise TargetError(f"cannot remove {count} of {len(order)} prunable weights.")
    mask = torch.ones(total, dtype=torch.bool, device=order.device)
    mask[order[:count]] = False
    return mask.view(shape)


def broken_groups(weight: Tensor, target: NByM) -> int:
    """How many groups of an n:m pattern have more non-zeros than their n; rows first, convolutions with their kernels last."""
    rows = weight.detach().reshape(len(weight), -1)
    group = torch.tensor(
        target.groups(rows.shape[1], math.prod(weight.shape[2:])), device=rows.device
    )
    sizes = group.bincount()
    kept = torch.zeros(len(rows), len(sizes), dtype=torch.int64, device=rows.device).index_add_(
        1, group, (rows != 0).long()
    )
    return int(
        (
            kept > torch.tensor([n - target.quota(n) for n in sizes.tolist()], device=rows.device)
        ).sum()
    )
