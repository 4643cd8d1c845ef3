"""N:M by ADMM, with a projection onto the pattern in place of a count."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs._system.context import Context
from lobs.solvers.admm import ADMM
from lobs.solvers.kernels import Quota

PATTERN_ADMM = ADMM(steps=13)  # a pattern takes more steps to settle than a count


def admm_mask(gram: Tensor, weight: Tensor, quota: Quota, context: Context) -> Tensor:
    """Return a mask of the pattern; products are in float32.

    Args:
        gram: equilibrated moment, (d, d).
        weight: equilibrated weights, (rows, d).
        quota: the pattern.
        context: memory that the iteration may use.
    """
    keep = Keeper(quota, weight.device)
    found, _ = PATTERN_ADMM.alternate(
        gram.float().unsqueeze(0),
        weight.float().unsqueeze(0),
        lambda values: keep(values[0]).unsqueeze(0),
        context,
    )
    return keep(found[0])


class Keeper:
    """Keep the largest weights of every group, as many as the quota leaves.

    All columns of group −1 are kept.
    """

    def __init__(self, quota: Quota, device: torch.device) -> None:
        order = quota.group.argsort(stable=True)
        order = order[quota.group[order] >= 0]
        sizes = quota.group[order].bincount(minlength=len(quota.allowed))
        longest = int(sizes.max()) if len(sizes) else 0
        self.held = (torch.arange(longest) < sizes.unsqueeze(1)).to(device)
        self.columns = torch.zeros(self.held.shape, dtype=torch.int64, device=device)
        self.columns[self.held] = order.to(device)
        self.kept = (sizes - quota.allowed).unsqueeze(1).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mask of the largest, in the shape of `values`; the first of equals."""
        size = torch.where(self.held, values.abs()[:, self.columns], -1.0)
        mask = torch.ones_like(values, dtype=torch.bool)
        mask[:, self.columns[self.held]] = (_rank(size) < self.kept)[:, self.held]
        return mask


def _rank(size: Tensor) -> Tensor:
    """Return the rank of every entry within the last dimension."""
    m = size.shape[-1]
    if m > 16:
        return size.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    # Sorting short rows is slow; comparing all pairs is not.
    rank = torch.zeros(size.shape, dtype=torch.int8, device=size.device)
    for i in range(m):
        for j in range(i):
            first = size[..., j] >= size[..., i]
            rank[..., i] += first
            rank[..., j] += ~first
    return rank
