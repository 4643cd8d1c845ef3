"""Solve layers of many narrow groups in one batch, such as depthwise convolutions.

Each group has its own moment, but a handful of columns only. One group at a time would take longer
to call than to compute. Rows of all groups are swapped, traded and refitted together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lobs.solvers import kernels, linalg
from lobs.solvers.kernels.rows import listed, pad_with_identity
from lobs.solvers.metric import Metric


def swap_together(
    gram: Tensor,
    weight: Tensor,
    mask: Tensor,
    importance: Tensor,
    protected: int,
    *,
    backend: kernels.Backend = "auto",
    label: str = "swaps",
) -> tuple[Tensor, Tensor, float]:
    """Swap and trade weights among the rows of all groups.

    Returns the mask, the best values on it, and how much the weighted error fell.

    Args:
        gram: equilibrated moments, (groups, d, d).
        weight: equilibrated weights, (groups, rows, d).
        mask: the support to start from, of the same shape.
        importance: the weight of each row's error, (groups, rows).
        protected: trailing columns that stay.
        backend: which kernels to use.
        label: the name of the progress bar.
    """
    groups, rows, d = weight.shape
    free = d - protected
    linear = weight @ gram
    inner, left = gram[:, :free, :free], linear[..., :free]
    if protected:  # the bias is at its best whatever else is kept
        cross = gram[:, :free, free:]
        corner = gram[:, free:, free:]
        inner = inner - cross @ cross.mT / corner
        left = left - linear[..., free:] * cross.mT / corner
    square = inner.unsqueeze(1).expand(groups, rows, free, free).reshape(-1, free, free).clone()
    best, inside = left.reshape(-1, free).clone(), mask[..., :free].reshape(-1, free).clone()
    _, gained = kernels.improve(
        square, best, inside, importance.flatten().to(best), backend=backend, label=label
    )
    values = torch.zeros_like(weight)
    values[..., :free] = torch.where(inside, best, 0.0).view(groups, rows, free)
    if protected:
        values[..., free:] = (linear[..., free:] - values[..., :free] @ cross) / corner
    found = mask.clone()
    found[..., :free] = inside.view(groups, rows, free)
    return found, values, float((gained * importance.flatten().to(gained)).sum())


def greedy_together(inverse: Tensor, weight: Tensor, protected: int) -> tuple[Tensor, Tensor]:
    """Delete the weights of every row greedily, the cheapest first, and refit after each.

    Returns the columns in the order in which each row loses them, and the loss of each deletion,
    both (groups, rows, columns that are not protected).

    Args:
        inverse: inverses of the moments, (groups, d, d).
        weight: weights, (groups, rows, d).
        protected: trailing columns that stay.
    """
    groups, rows, d = weight.shape
    a = inverse.unsqueeze(1).expand(groups, rows, d, d).reshape(-1, d, d).clone()
    w, each = weight.reshape(-1, d).clone(), torch.arange(groups * rows, device=weight.device)
    gone = torch.zeros_like(w, dtype=torch.bool)
    gone[:, d - protected :] = True
    order, losses = [], []
    for _ in range(d - protected):
        diagonal = a.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(a.dtype).tiny)
        cost = torch.where(gone, torch.inf, w.square() / diagonal)
        loss, q = cost.min(dim=1)
        line, pivot = a[each, q], diagonal[each, q].unsqueeze(1)
        w = w - w[each, q].unsqueeze(1) / pivot * line
        a -= (line / pivot).unsqueeze(2) * line.unsqueeze(1)
        gone[each, q] = True
        order.append(q)
        losses.append(loss)
    shape = (groups, rows, d - protected)
    found = torch.stack(order, dim=1), torch.stack(losses, dim=1)
    return found[0].to(torch.int32).view(shape), found[1].view(shape)


def fit_together(metrics: Sequence[Metric], weight: Tensor, mask: Tensor) -> Tensor:
    """Return the best weights on a support, for the rows of all groups at once.

    Args:
        metrics: every group's prepared moment.
        weight: the layer's weights, (groups, rows, d).
        mask: the support, of the same shape.
    """
    gram, scale = torch.stack([m.gram for m in metrics]), torch.stack([m.scale for m in metrics])
    scale = scale.unsqueeze(1)
    scaled = weight.to(gram.dtype) * scale
    wanted = (scaled @ gram).flatten(0, 1)
    index, real = listed(mask.flatten(0, 1))
    owner = torch.arange(len(gram), device=index.device).repeat_interleave(weight.shape[1])
    block = gram[owner[:, None, None], index.unsqueeze(2), index.unsqueeze(1)]
    pad_with_identity(block, real)
    solved = torch.zeros_like(wanted)
    if index.shape[1]:
        part = linalg.solve_blocks(block, wanted.gather(1, index) * real)
        solved = solved.scatter_add(1, index, part * real)
    solved = solved.view(weight.shape)
    # As `Metric.unscaled`: weights on dead inputs, and rows that lost nothing, stay.
    dead = scale == 0
    same = dead | mask.all(dim=-1, keepdim=True)
    restored = torch.where(same, weight.to(gram.dtype), solved / torch.where(dead, 1.0, scale))
    return torch.where(mask, restored, 0.0)
