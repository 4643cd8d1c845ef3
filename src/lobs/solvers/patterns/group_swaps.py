"""Swaps within N:M groups: exchange a removed weight for a kept neighbour while errors fall."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs.solvers import kernels, linalg

_BATCH_ELEMENTS = 2**25  # entries of inverses in memory at a time: 128 MB in float32
_WORTH = 1e-6  # share of a row's error below which a gain is rounding


def swap_within_groups(
    gram: Tensor, weight: Tensor, mask: Tensor, group: Tensor, *, backend: kernels.Backend = "auto"
) -> Tensor:
    """Improve a mask that keeps equally many weights of a group in every row.

    Every group swaps at most once. Takes d³/4 multiply-adds per row for the factorisation where
    half is kept, then 2d² per swap.

    Args:
        gram: equilibrated moment, (d, d).
        weight: equilibrated weights, (rows, d).
        mask: the pattern to improve.
        group: each column's group; columns of group −1 stay as they are.
        backend: which kernels to use.
    """
    support = int(mask[0].sum()) if len(mask) else 0
    if support in (0, mask.shape[1]):
        return mask
    batch = max(1, _BATCH_ELEMENTS // (mask.shape[1] * support))
    spans = [slice(start, start + batch) for start in range(0, len(mask), batch)]
    on_device = group.to(mask.device)
    parts = [
        kernels.swap(_state(gram, weight[s], mask[s], on_device), _WORTH, backend=backend)
        for s in spans
    ]
    return torch.cat(parts)


def _state(gram: Tensor, weight: Tensor, mask: Tensor, group: Tensor) -> kernels.Swaps:
    rows = len(mask)
    kept, gone = (m.nonzero()[:, 1].view(rows, -1) for m in (mask, ~mask))
    inverse = linalg.inverse_on_supports(gram, kept)
    across = gram[kept.unsqueeze(2), gone.unsqueeze(1)]
    u = inverse @ across
    wanted = weight @ gram
    v = torch.zeros_like(weight).scatter_(
        1, kept, (inverse @ wanted.gather(1, kept).unsqueeze(2)).squeeze(2)
    )
    diagonal = torch.zeros_like(weight).scatter_(1, kept, -inverse.diagonal(dim1=1, dim2=2))
    diagonal.scatter_(1, gone, gram.diagonal()[gone] - (across * u).sum(dim=1))
    # Every row has equally many pairs of a kept and a removed column of one group.
    together = group[kept].unsqueeze(2) == group[gone].unsqueeze(1)
    row, i, j = together.nonzero().view(rows, -1, 3).unbind(dim=2)
    return kernels.Swaps(
        gram=gram,
        inverse=inverse,
        kept=kept,
        group=group,
        mask=mask,
        y=torch.where(mask, v, wanted - v @ gram),
        diagonal=diagonal,
        p=kept[row, i],
        q=gone[row, j],
        off=u[row, i, j],
        error=((weight - v) @ gram * (weight - v)).sum(dim=1),
    )
