"""From scores to masks with exact counts, whatever the ties."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs.errors import TargetError


def removal_order(scores: Tensor) -> Tensor:
    """Flat positions from the least to the most important; ties go in order of position, so results repeat."""
    return torch.sort(scores.flatten(), stable=True).indices


def mask_from_order(order: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Keep everything but the first `count` positions of an order of removal."""
    total = int(torch.Size(shape).numel())
    if not 0 <= count <= len(order):
        raise TargetError(f"cannot remove {count} of {len(order)} prunable weights.")
    mask = torch.ones(total, dtype=torch.bool, device=order.device)
    mask[order[:count]] = False
    return mask.view(shape)


def prunable_positions(shape: tuple[int, ...], protected: int, device: torch.device) -> Tensor:
    """Flat positions of all weights outside the last `protected` columns."""
    grid = torch.arange(int(torch.Size(shape).numel()), device=device).view(shape)
    return grid[..., : shape[-1] - protected].flatten()
