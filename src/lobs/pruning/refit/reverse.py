"""Products with a transposed Jacobian by plain reverse-mode differentiation.

`torch.func.vjp` gives the same numbers, but its first call imports `torch._dynamo`, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lobs.pruning.refit.preconditioner import Vector


def vjp(
    function: Callable[[Vector], Tensor], at: Vector
) -> tuple[Tensor, Callable[[Tensor], tuple[Vector]]]:
    """Evaluate `function`, and return its value and the map v ↦ (Jᵀv,).

    The map may be called several times. Parameters that the value does not depend on get zeros.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    with torch.enable_grad():
        value = function(leaves)

    def transposed(v: Tensor) -> tuple[Vector]:
        if not value.requires_grad:
            return ({name: torch.zeros_like(tensor) for name, tensor in at.items()},)
        # The gradient of a scalar: torch imports sympy to compare shapes where it is given v.
        with torch.enable_grad():
            product = (value * v.detach()).sum()
        found = torch.autograd.grad(
            product, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        return (
            {
                name: torch.zeros_like(leaf) if gradient is None else gradient
                for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
            },
        )

    return value.detach(), transposed
