"""L-OBS as published (Dong, Chen, Pan 2017): sensitivities once, one fixed inverse for the whole sweep.

Kept faithful, flaw included: the paper calls the fixed inverse exact, but after the first deletion
it is stale. The stop rule by ε is the corrected one, on the layer's recomputed error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lobs.errors import SolverError
from lobs.solvers import linalg, scores
from lobs.solvers.kernels.rows import blocks, by_rows
from lobs.solvers.masks import mask_from_order, removal_order
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem, choose_count, finish
from lobs.solvers.solution import Solution
from lobs.targets import Target


@dataclass(frozen=True)
class LOBS:
    """The published method. Time of at most eight products rows·d², plus d³ for the inverse; memory of a few copies of W.

    By ratio it sweeps once; by ε it searches the count with about log₂(weights) sweeps. `alpha` is
    the paper's α: where Ψ is singular, 1/α goes onto its diagonal (the paper gives the range 10⁴ …
    10⁸).
    """

    alpha: float = 1e4
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise SolverError(
                f"alpha is {self.alpha:g}: it must be positive; the paper takes 1e4 to 1e8."
            )

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the module."""
        damped = problem.damped_metrics(first=1 / self.alpha)
        metrics = [
            replace(m, known_inverse=m.inverse) for m in damped
        ]  # where it is not kept, taken only once
        sensitivity = torch.stack(
            [scores.obs(w, m) for (w, _), m in zip(problem.groups, metrics, strict=True)]
        )
        shape = tuple(sensitivity.shape)
        order = removal_order(sensitivity, problem.protected)

        def solution_at(count: int) -> Solution:
            mask = mask_from_order(order, count, shape)
            parts = [
                _compensate(w, m, s, kept)
                for (w, _), m, s, kept in zip(
                    problem.groups, metrics, sensitivity, mask, strict=True
                )
            ]
            weight = torch.stack(parts).view(problem.weight.shape)
            damping = max(m.damping for m in metrics)
            return finish(problem, weight, mask.view(problem.weight.shape), damping=damping)

        return solution_at(choose_count(problem, target, lambda k: solution_at(k).error))


def _compensate(weight: Tensor, metric: Metric, sensitivity: Tensor, mask: Tensor) -> Tensor:
    """Delete in order of sensitivity, each time moving the row by −(w_q/[Ψ⁻¹]_qq) Ψ⁻¹e_q with w_q as it now stands.

    A panel of deletions at a time: first all rows' steps, then one product moves their weights. The
    mask goes on at the end, which changes nothing: a deleted weight is never read again.
    """
    v = metric.scaled(weight)
    # Kept weights sort last, so that the t-th entry of every row is its t-th deletion.
    order = torch.where(mask, torch.inf, sensitivity).sort(dim=1, stable=True).indices
    count = (~mask).sum(dim=1)
    wide = max(_PANEL, weight.shape[-1] // PRODUCTS)
    for done in range(0, int(count.max()) if count.numel() else 0, wide):
        panel = order[:, done : done + wide]
        v -= (
            _steps(v, metric.inverse, panel, (count - done).clamp(0, panel.shape[1]))
            @ metric.inverse
        )
    return metric.unscaled(v, weight, mask)


# Deletions of a row at a time, at least: fewer need more products, more of them longer triangles.
# And the most products.
_PANEL, PRODUCTS = 256, 8


def _steps(v: Tensor, inverse: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """How far every row moves along Ψ⁻¹e_q for each q it deletes, the first `count` of its `order`; zero for other columns.

    One fixed inverse A makes the steps x of deletions q₁, q₂ … a forward substitution: Σ_{s ≤ t}
    A_{q_t, q_s} x_s = v_{q_t}.
    """
    steps = torch.zeros_like(v)

    def substitute(rows: Tensor) -> None:
        columns = order[rows, : int(count[rows].max())]
        real = torch.arange(columns.shape[1], device=rows.device) < count[rows].unsqueeze(1)
        asked = v[rows].gather(1, columns) * real
        steps[rows.unsqueeze(1), columns] = linalg.substitute(blocks(inverse, columns, real), asked)

    by_rows(substitute, count)
    return steps
