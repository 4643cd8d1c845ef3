"""From scores to masks with exact counts, whatever the ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lobs.errors import SolverError, TargetError
from lobs.solvers.problem import Problem
from lobs.targets import Budget, ErrorBudget, Sparsity, Target


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
