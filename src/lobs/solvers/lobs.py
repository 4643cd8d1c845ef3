"""L-OBS as published (Dong, Chen, Pan 2017): sensitivities once, one fixed inverse for the whole sweep.

Kept faithful, flaw included: the paper calls the fixed inverse exact, but after the first deletion it is stale. The
stop rule by ε is the corrected one, on the layer's recomputed error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lobs import linalg, scores
from lobs.errors import SolverError
from lobs.masks import mask_from_order, removal_order
from lobs.problem import Problem, choose_count, finish
from lobs.solution import Solution
from lobs.targets import Target


@dataclass(frozen=True)
class LOBS:
    """The published method. Time rows·d² for the sweep plus d³ for the inverse; memory of a few copies of the weight.

    By ratio it sweeps once; by ε it searches the count with about log₂(weights) sweeps. `alpha` is the paper's α: where Ψ is
    singular, 1/α goes onto its diagonal (the paper gives the range 10⁴ … 10⁸).
    """

    alpha: float = 1e4
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise SolverError(f"alpha is {self.alpha:g}: it must be positive; the paper takes 1e4 to 1e8.")

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the module."""
        metrics = problem.damped_metrics(first=1 / self.alpha)
        sensitivity = torch.stack([scores.obs(w, m) for (w, _), m in zip(problem.groups, metrics, strict=True)])
        shape = tuple(sensitivity.shape)
        order = removal_order(sensitivity, problem.protected)

        def solution_at(count: int) -> Solution:
            mask = mask_from_order(order, count, shape)
            parts = [
                _compensate(w, m, s, kept)
                for (w, _), m, s, kept in zip(problem.groups, metrics, sensitivity, mask, strict=True)
            ]
            weight = torch.stack(parts).view(problem.weight.shape)
            damping = max(m.damping for m in metrics)
            return finish(problem, weight, mask.view(problem.weight.shape), damping=damping)

        return solution_at(choose_count(problem, target, lambda k: solution_at(k).error))


def _compensate(weight: Tensor, metric: linalg.Metric, sensitivity: Tensor, mask: Tensor) -> Tensor:
    """Delete in order of sensitivity, each time moving the row by −(w_q/[Ψ⁻¹]_qq) Ψ⁻¹e_q with w_q as it now stands.

    Rows run side by side; a row with nothing left to delete stands still. The mask goes on at the end, which changes
    nothing: a deleted weight is never read again.
    """
    v = metric.scaled(weight)
    a = metric.inverse
    pivot = a.diagonal()
    # Kept weights sort last, so that the t-th entry of every row is its t-th deletion.
    order = torch.where(mask, torch.inf, sensitivity).sort(dim=1, stable=True).indices
    count = (~mask).sum(dim=1)
    for t in range(int(count.max()) if count.numel() else 0):
        q = order[:, t]
        step = torch.where(t < count, v.gather(1, q.unsqueeze(1)).squeeze(1) / pivot[q], 0.0)
        v -= step.unsqueeze(1) * a[q]
    return metric.unscaled(v, weight, mask)
