"""The answer to a layer problem: exact masks, sparse weights and their recomputed error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lobs.errors import SolverError, TargetError
from lobs.targets import Budget, ErrorBudget, Sparsity, Target

if TYPE_CHECKING:
    from lobs.solvers.problem import Problem

# Below this share of its row's largest contribution to the output, a weight is rounding noise.
_NOISE = 1e-6


@dataclass(frozen=True, eq=False)
class Solution:
    """A sparse replacement for one layer's weights.

    Args:
        weight: the new weights, in the layer's shape and dtype.
        mask: True where a weight was kept; always True in the bias column.
        error: E recomputed from Ψ for these very weights, never accumulated.
        energy: mean squared output of the dense layer.
        removed: number of weights removed.
        prunable: number of weights that could have been removed.
        damping: largest λ that was added to the diagonal of a group's Ψ.
        curve: `curve[k]` is the error with k weights removed, from solvers that know it. It
            includes the damping: `curve[removed] = error + damping · ‖V − W‖²`.
        status: "ok", and how the solution was found where there are several ways.
    """

    weight: Tensor
    mask: Tensor
    error: float
    energy: float
    removed: int
    prunable: int
    damping: float = 0.0
    curve: Tensor | None = field(default=None, repr=False)
    status: str = "ok"

    def __repr__(self) -> str:
        return (
            f"Solution(kept {self.kept:,} of {self.prunable:,}, "
            f"relative error {self.relative_error:.3g}, status={self.status!r})"
        )

    def without_tensors(self) -> Solution:
        """Return the numbers alone, for when the weights are in a network and memory is short."""
        return replace(
            self, weight=self.weight.new_empty(0), mask=self.mask.new_empty(0), curve=None
        )

    @property
    def kept(self) -> int:
        """Number of prunable weights left."""
        return self.prunable - self.removed

    @property
    def relative_error(self) -> float:
        """√E over the norm of the dense output; 0 where that output is 0 and nothing changed."""
        if self.energy == 0:
            return 0.0 if self.error == 0 else float("inf")
        return math.sqrt(self.error / self.energy)

    @property
    def losses(self) -> Tensor | None:
        """The cost of each deletion made, in order; their sum is `curve[removed]`."""
        return None if self.curve is None else self.curve[: self.removed + 1].diff()


def finish(
    problem: Problem,
    weight: Tensor,
    mask: Tensor,
    *,
    damping: float = 0.0,
    curve: Tensor | None = None,
) -> Solution:
    """Round weights to the layer's dtype, apply the mask, and recompute the error of those bits.

    Args:
        problem: the problem that was solved.
        weight: the solver's weights, in float64.
        mask: True where a weight is kept.
        damping: largest λ that was used.
        curve: the error at every count, if the solver knows it.
    """
    # The best weights may exceed the layer's dtype: half precision ends at 65,504.
    most = torch.finfo(problem.weight.dtype).max
    final = (
        torch.where(mask, weight, torch.zeros_like(weight))
        .clamp(-most, most)
        .to(problem.weight.dtype)
    )
    # A zero weight must not return as rounding noise. A row that lost only zeros must not change.
    zero = problem.weight == 0
    if bool(zero.any()):
        energy = problem.moment.diagonal(dim1=-2, dim2=-1).clamp_min(0).to(torch.float64)
        # In float64: half precision would underflow and overflow.
        size = final.abs() * energy.sqrt().unsqueeze(-2)
        noise = zero & (size <= _NOISE * size.amax(dim=-1, keepdim=True))
        unchanged = (mask | zero).all(dim=-1, keepdim=True)
        final = torch.where(unchanged, problem.weight, torch.where(noise, 0.0, final))
    return Solution(
        weight=final,
        mask=mask,
        error=problem.error_of(final),
        energy=problem.energy,
        removed=int((~mask).sum()),
        prunable=problem.prunable,
        damping=damping,
        curve=curve,
    )


def removal_order(scores: Tensor, protected: int = 0) -> Tensor:
    """Return flat positions from least to most important, without the last `protected` columns.

    Ties go in order of position, so results repeat.
    """
    grid = torch.arange(scores.numel(), device=scores.device).view(scores.shape)
    free = grid[..., : scores.shape[-1] - protected].flatten()
    return free[torch.sort(scores.flatten()[free], stable=True).indices]


def mask_from_order(order: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Return the mask that keeps all but the first `count` positions of a removal order.

    Args:
        order: flat positions, the first to go first.
        count: number of positions to remove.
        shape: shape of the mask.
    """
    total = int(torch.Size(shape).numel())
    if not 0 <= count <= len(order):
        raise TargetError(f"cannot remove {count} of {len(order)} prunable weights.")
    mask = torch.ones(total, dtype=torch.bool, device=order.device)
    mask[order[:count]] = False
    return mask.view(shape)


def mask_of_largest(scores: Tensor, count: int, protected: int = 0) -> Tensor:
    """Return the mask that keeps all but the `count` smallest scores, as the two above would.

    It finds one threshold instead of the whole order, which takes a fifth of the time.

    Args:
        scores: importance of each position.
        count: number of positions to remove.
        protected: number of last columns that stay.
    """
    free = scores[..., : scores.shape[-1] - protected]
    if 0 < count <= free.numel() and scores.device.type == "cpu":
        flat = free.flatten()
        limit = torch.from_numpy(np.partition(flat.numpy(), count - 1)[count - 1 : count])
        gone = flat < limit
        ties = (flat == limit).nonzero().squeeze(1)
        gone[ties[: count - int(gone.sum())]] = True
        if int(gone.sum()) == count:  # it is not where scores are NaN
            mask = torch.ones_like(scores, dtype=torch.bool)
            mask[..., : free.shape[-1]] = ~gone.view(free.shape)
            return mask
    return mask_from_order(removal_order(scores, protected), count, tuple(scores.shape))


def choose_count(
    problem: Problem, target: Target, error_at: Callable[[int], float], *, step: int = 1
) -> int:
    """Return how many weights to remove: the target's fraction, or the most within its error.

    The search assumes that the error grows with the count, as the greedy's does. For other solvers
    it grows up to noise: the count found is within the limit, though a larger one might be too.

    Args:
        problem: the layer problem.
        target: a `Sparsity` or an `ErrorBudget`.
        error_at: the error with a number of weights removed.
        step: counts are multiples of it, for solvers to which every trial is expensive.
    """
    match target:
        case Sparsity():
            return target.count(problem.prunable)
        case ErrorBudget():
            limit = target.limit(problem.energy)
            low, high = 0, problem.prunable // step
            while low < high:
                middle = (low + high + 1) // 2
                if error_at(middle * step) <= limit:
                    low = middle
                else:
                    high = middle - 1
            return low * step
        case Budget():
            raise TargetError(
                f"{problem.name}: a Budget is for a whole network; a single layer takes Sparsity "
                "or ErrorBudget."
            )
    raise SolverError(
        f"{problem.name}: this solver is not compatible with {target!r}. Use solver='auto' or "
        "solver='greedy'."
    )


def joined(masks: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the union of two sets of named masks; a weight that either removes is removed."""
    both = {name: masks[name] & more[name] for name in masks.keys() & more.keys()}
    return {**masks, **more, **both}
