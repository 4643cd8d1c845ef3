"""N:M by ADMM: the same problem split into a quadratic one without the pattern and a projection onto it.

V minimises the layer's error plus ρ/2 ‖V − D + U‖², one matrix product once (G + ρI)⁻¹ is known; D keeps the largest of V + U
in each group. Six penalties, each with one inverse, 15 steps each: 90 products of rows·d² and 6 inverses, whatever the pattern.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lobs import linalg
from lobs.kernels import Quota

_PENALTIES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.3)  # the Gram matrix has a unit diagonal
_STEPS = 15


def admm_mask(gram: Tensor, weight: Tensor, quota: Quota) -> Tensor:
    """A mask of the pattern for equilibrated weights; products in float32."""
    g, w = gram.float(), weight.float()
    wanted, keep = w @ g, Keeper(quota, w.device)
    mask = keep(w)
    d, u, before = torch.where(mask, w, 0.0), torch.zeros_like(w), _PENALTIES[0]
    for penalty in _PENALTIES:
        inverse = linalg.ridge_inverse(gram, penalty).float()
        u *= before / penalty  # U is the multiplier over ρ
        before = penalty
        for _ in range(_STEPS):
            v = (wanted + penalty * (d - u)) @ inverse + u
            mask = keep(v)
            d = torch.where(mask, v, 0.0)
            u = v - d
    return mask


class Keeper:
    """Keep, in every group, the largest that the quota leaves; columns of group −1 all."""

    def __init__(self, quota: Quota, device: torch.device) -> None:
        order = quota.group.argsort(stable=True)
        order = order[quota.group[order] >= 0]
        sizes = quota.group[order].bincount(minlength=len(quota.allowed))
        self.held = (torch.arange(int(sizes.max()) if len(sizes) else 0) < sizes.unsqueeze(1)).to(device)
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
