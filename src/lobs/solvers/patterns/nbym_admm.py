"""N:M by alternating directions: `ADMM` with a projection onto the pattern in place of a count."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs.solvers.admm import ADMM
from lobs.solvers.kernels import Quota

STEPS = 13  # a pattern takes longer to finish than a count


def admm_mask(gram: Tensor, weight: Tensor, quota: Quota) -> Tensor:
    """A mask of the pattern for equilibrated weights; products in float32."""
    keep = Keeper(quota, weight.device)
    found, _ = ADMM(steps=STEPS).alternate(
        gram.float().unsqueeze(0),
        weight.float().unsqueeze(0),
        lambda values: keep(values[0]).unsqueeze(0),
    )
    return keep(found[0])


class Keeper:
    """Keep, in every group, the largest that the quota leaves; columns of group −1 all."""

    def __init__(self, quota: Quota, device: torch.device) -> None:
        order = quota.group.argsort(stable=True)
        order = order[quota.group[order] >= 0]
        sizes = quota.group[order].bincount(minlength=len(quota.allowed))
        self.held = (torch.arange(int(sizes.max()) if len(sizes) else 0) < sizes.unsqueeze(1)).to(
            device
        )
        self.columns = torch.zeros(self.held.shape, dtype=torch.int64, device=device)
        self.columns[self.held] = order.to(device)
        self.kept = (sizes - quota.allowed).unsqueeze(1).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """The mask of the largest, in the shape of `values`; of equals the first."""
        size = torch.where(self.held, values.abs()[:, self.columns], -1.0)
        mask = torch.ones_like(values, dtype=torch.bool)
        mask[:, self.columns[self.held]] = (_rank(size) < self.kept)[:, self.held]
        return mask


def _rank(size: Tensor) -> Tensor:
    """How many of the last dimension come before each. Sorting short rows is slow; comparing all pairs is not."""
    m = size.shape[-1]
    if m > 16:
        return size.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    rank = torch.zeros(size.shape, dtype=torch.int8, device=size.device)
    for i in range(m):
        for j in range(i):
            first = size[..., j] >= size[..., i]
            rank[..., i] += first
            rank[..., j] += ~first
    return rank
