"""L-OBS as published (Dong, Chen, Pan 2017): one fixed inverse for the whole sweep.

Kept faithful, flaw included: the paper calls the fixed inverse exact, but it is stale after the
first deletion. The stop rule by ε is the corrected one: it uses the layer's recomputed error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lobs.errors import SolverError
from lobs.solvers import linalg, scores
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.kernels.rows import blocks, by_rows
from lobs.solvers.metric import Metric
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, choose_count, finish, mask_from_order, removal_order
from lobs.targets import Target

_PANEL = 256  # deletions of a row at a time, at least
_PRODUCTS = 8  # products of rows·d² in one sweep, at most


@dataclass(frozen=True)
class LOBS:
    """The published method.

    Takes at most eight products of rows·d², plus d³ for the inverse, and memory of a few copies of
    W. By ratio it sweeps once. By ε it searches the count in about log₂(weights) sweeps.

    Args:
        alpha: the paper's α. Where Ψ is singular, 1/α is added to its diagonal. The paper gives
            the range 10⁴ … 10⁸.
        needs: optional `Problem` fields that must be present: none.
    """

    alpha: float = 1e4
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise SolverError(
                f"alpha is {self.alpha:g}: it must be positive; the paper takes 1e4 to 1e8."
            )

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time of one sweep on two cores."""
        d, rows = shape.columns, shape.groups * shape.rows
        factor = COSTS.factor * shape.groups * d**3
        return (factor + COSTS.product * _PRODUCTS * rows * d**2) / 1e9

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        if shape.single_copy:  # Ψ, its inverse, and seven float64 copies of the weights
            return 8 * shape.columns**2 + 56 * shape.weights
        return shape.solving_bytes

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        damped = problem.damped_metrics(first=1 / self.alpha)
        # The inverse is computed once even where the metric does not keep it.
        metrics = [replace(m, known_inverse=m.inverse) for m in damped]
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
    """Delete in order of sensitivity; each deletion moves its row by −(w_q/[Ψ⁻¹]_qq) Ψ⁻¹e_q.

    A panel of deletions at a time: first the steps of all rows, then one product moves the weights.
    The mask is applied at the end, which changes nothing: a deleted weight is never read again.
    """
    v = metric.scaled(weight)
    # Kept weights sort last, so the t-th entry of every row is its t-th deletion.
    order = torch.where(mask, torch.inf, sensitivity).sort(dim=1, stable=True).indices
    count = (~mask).sum(dim=1)
    wide = max(_PANEL, weight.shape[-1] // _PRODUCTS)
    for done in range(0, int(count.max()) if count.numel() else 0, wide):
        panel = order[:, done : done + wide]
        steps = _steps(v, metric.inverse, panel, (count - done).clamp(0, panel.shape[1]))
        v -= steps @ metric.inverse
    return metric.unscaled(v, weight, mask)


def _steps(v: Tensor, inverse: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """Return how far every row moves along Ψ⁻¹e_q for each column q that it deletes.

    With one fixed inverse A, the steps x of deletions q₁, q₂ … follow from a forward substitution:
    Σ_{s ≤ t} A_{q_t, q_s} x_s = v_{q_t}.

    Args:
        v: the rows' present weights.
        inverse: A.
        order: each row's columns in order of deletion.
        count: how many of them each row deletes. Other columns get zero.
    """
    steps = torch.zeros_like(v)

    def substitute(rows: Tensor) -> None:
        columns = order[rows, : int(count[rows].max())]
        real = torch.arange(columns.shape[1], device=rows.device) < count[rows].unsqueeze(1)
        asked = v[rows].gather(1, columns) * real
        steps[rows.unsqueeze(1), columns] = linalg.substitute(blocks(inverse, columns, real), asked)

    by_rows(substitute, count)
    return steps
