"""Prune by ADMM with conjugate gradients, the family of ALPS (Meng et al., NeurIPS 2024).

This is the eigendecomposition form. It splits min ½ tr((V−W) Ψ (V−W)ᵀ) with a hard count into two
steps. The least-squares step applies (Ψ + ρI)⁻¹ by one eigendecomposition for every ρ. The other
step projects onto the largest entries. ρ grows every third step, faster while the support moves
more. When the support stays, diagonally preconditioned conjugate gradients finish on it. Columns
are equilibrated first, as in the paper. `start` and `growth` are the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def admm(
    weight: Tensor,
    moment: Tensor,
    sparsity: float,
    *,
    protected: int = 0,
    start: float = 0.1,
    growth: tuple[float, float, float] = (1.3, 1.2, 1.1),
    steps: int = 300,
    polish: int = 10,
    explicit: bool = False,
    pattern: tuple[int, int] | None = None,
) -> Tensor:
    """Prune one matrix to a fraction of zeros outside the last `protected` columns.

    `explicit` forms (Ψ + ρI)⁻¹ whenever ρ changes, as published. That costs d³ each time, and one
    product of rows·d² a step instead of two. `pattern` keeps n of every m columns instead of a
    sparsity.
    """
    d = weight.shape[1]
    scale = moment.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale == 0, 1.0, scale)
    gram = (moment / scale / scale.unsqueeze(1)).float()
    w = (weight * scale).float()
    values, vectors = torch.linalg.eigh(gram + 1e-6 * torch.eye(d))
    wanted = w @ gram
    count = round(sparsity * w[:, : d - protected].numel())
    rho = start
    v, dual = w.clone(), torch.zeros_like(w)
    before = None

    def inverse() -> Tensor | None:
        return (vectors / (values + rho)) @ vectors.mT if explicit else None

    solved = inverse()
    for step in range(steps):
        right = wanted - dual + rho * v
        x = ((right @ vectors) / (values + rho)) @ vectors.mT if solved is None else right @ solved
        free = x + dual / rho
        v = _largest(free, count, protected) if pattern is None else _of_groups(free, *pattern)
        dual += rho * (x - v)
        if step % 3 == 2:
            support = v != 0
            if before is not None:
                moved = int((support ^ before).sum()) / max(1, int(support.sum()))
                if moved == 0:
                    break
                rho *= growth[0] if moved >= 0.1 else growth[1] if moved >= 0.005 else growth[2]
                solved = inverse()
            before = support
    return (_polish(v, gram, wanted, v != 0, polish) / scale).to(weight)


def _largest(x: Tensor, count: int, protected: int) -> Tensor:
    scores = x.abs()
    if protected:
        scores[:, -protected:] = torch.inf
    if not count:
        return x
    threshold = scores.flatten().kthvalue(count).values
    return torch.where(scores > threshold, x, 0.0)


def _of_groups(x: Tensor, n: int, m: int) -> Tensor:
    groups = x.view(len(x), -1, m)
    kept = groups.abs().topk(n, dim=-1).indices
    return torch.zeros_like(groups).scatter(-1, kept, groups.gather(-1, kept)).view_as(x)


def _polish(v: Tensor, gram: Tensor, wanted: Tensor, support: Tensor, steps: int) -> Tensor:
    """Run masked conjugate gradients on all rows at once."""
    residual = torch.where(support, wanted - v @ gram, 0.0)
    direction = residual.clone()
    size = residual.square().sum(dim=1, keepdim=True)
    for _ in range(steps):
        image = torch.where(support, direction @ gram, 0.0)
        alpha = size / (direction * image).sum(dim=1, keepdim=True).clamp_min(1e-30)
        v = v + alpha * direction
        residual = residual - alpha * image
        new = residual.square().sum(dim=1, keepdim=True)
        direction = residual + new / size.clamp_min(1e-30) * direction
        size = new
    return v
