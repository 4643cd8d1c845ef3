r"""Swaps: improve a support by exchanging weights until no exchange helps.

For one row with support S, only the weakest weights inside and the most wanted outside can take
part in a useful swap. They form the row's pool U. The other kept weights, F = S \\ U, always take
their best values. Eliminating them leaves an exact least-squares problem in the |U| variables of
the pool. It is small enough to try *every* add-one-drop-one swap, with all kept weights
re-optimised. Rows also trade with each other (`kernels.improve`). So the error never grows. A round
costs a Cholesky of |S|³/3 flops and |S|²·|U| per row: at 90 % sparsity a hundredth of the greedy's
d³/3. The factors also give the row's best weights.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from lobs.solvers import kernels, linalg
from lobs.solvers.kernels.rows import by_rows, listed, pad_with_identity, restrict
from lobs.solvers.least_squares import (
    FLOAT32_SAFE,
    approach_least_squares,
    stacked,
    sweep_dtype,
    typical_independence,
)
from lobs.solvers.linalg import is_narrow
from lobs.solvers.problem import Problem
from lobs.solvers.together import swap_together

_POOL = 128  # candidates on either side, at most; more find little more
_LEAST_POOL = 32  # candidates on either side, at least
# Candidates per root of a row's kept weights; cost grows faster than what more find. In layers of
# _LARGE weights the third loses 0.05 % of the error at most, and takes a tenth of the time.
_SHARE, _LARGE_SHARE, _LARGE = 3, 2, 100_000
# The cost of a round in multiply-adds of matrix products: per multiply-add of the elimination, per
# cube of the pool's size, and per row.
_ELIMINATING, _SEARCHING, _ROW = 1.5, 3, 1e6
_ENOUGH = 0.1  # moves per row below which another round is not worth its factorisations
_BATCH_BYTES = 2**29  # bytes of a batch's pools, and of its factors if they are kept
_TOGETHER = 64  # rows whose factors must fit into a batch for factors to be kept
_TYPICAL, _ENOUGH_ROWS = 4, 16  # supports that stand for all; at most one in so many rows
_STEPS = 15  # conjugate-gradient steps for values that only the choice of pools depends on
_FEW = 5  # such steps from a near start


class Exchanged(NamedTuple):
    """The result of `swap`.

    Args:
        mask: a support of the same size, in the mask's shape.
        values: weights at or near the best on it, (groups, rows, d) in equilibrated units.
        gained: how much the first round lowered the weighted error.
    """

    mask: Tensor
    values: Tensor
    gained: float


def swap(
    problem: Problem,
    mask: Tensor,
    near: Tensor | None = None,
    *,
    rounds: int = 3,
    seconds: float | None = None,
    backend: kernels.Backend = "auto",
) -> Exchanged:
    """Exchange weights of a support for better ones.

    Stops when a round makes next to no moves, after `rounds`, or after `seconds`.

    Args:
        problem: the layer problem.
        mask: the support to start from.
        near: weights near the best on it, in the units of `Exchanged.values`.
        rounds: largest number of rounds.
        seconds: time limit; None for none.
        backend: which kernels to use.
    """
    late = None if seconds is None else time.perf_counter() + seconds
    among = problem.context.group
    gram, weight = stacked(problem, _kind(problem))
    # Errors are squares: float32 holds them only for weights near 1.
    size = float(weight.abs().amax()) if weight.numel() else 0.0
    size = size if size > 0 else 1.0
    weight = weight / size
    kept = mask.view(weight.shape).clone(memory_format=torch.contiguous_format)
    among.broadcast(kept)  # ties may be broken differently on another kind of processor
    if is_narrow(*weight.shape):
        kept, values, gained = swap_together(
            gram, weight, kept, problem.importance, problem.protected,
            backend=backend, label=f"swaps {problem.name}",
        )  # fmt: skip
        values = values.to(problem.metrics[0].gram.dtype)
        return Exchanged(kept.view(mask.shape), values.mul_(size), gained * size**2)
    groups = [_Rows(problem, g, size, kept[g], late, backend) for g in range(len(weight))]
    values, first = weight if near is None else near / size, 0.0
    for turn in range(max(1, rounds)):
        if turn == 0 or not all(group.keeps_factors for group in groups):
            steps = _STEPS if near is None or turn else _FEW
            values = approach_least_squares(
                gram, weight, kept, values.to(weight), steps=steps, tolerance=1e-2
            )
            values = values.to(problem.metrics[0].gram.dtype)
        found = [group.exchange(v) for group, v in zip(groups, values, strict=True)]
        moves, gained = (sum(kind) for kind in zip(*found, strict=True))
        first = first if turn else gained
        if moves <= _ENOUGH * weight[..., 0].numel() or all(group.complete for group in groups):
            break
        if late is not None and among.all_gather(time.perf_counter() > late)[0]:
            break
    return Exchanged(kept.view(mask.shape), values.mul_(size), first * size**2)


def _kind(problem: Problem) -> torch.dtype:
    """Return the precision of a search in all groups at once; float32 for conjugate gradients."""
    if not is_narrow(len(problem.metrics), *problem.weight.shape[-2:]):
        return torch.float32
    sound = all(m.independence >= FLOAT32_SAFE for m in problem.metrics)
    return torch.float32 if sound else torch.float64


def pool_size(kept: float, free: int, rows: int) -> int:
    """Return how many of a row's `free` columns a round tries when `kept` of them are kept."""
    share = _LARGE_SHARE if rows * free >= _LARGE else _SHARE
    return min(2 * max(_LEAST_POOL, min(_POOL, int(share * kept**0.5))), free)


def round_work(kept: float, free: int, rows: int) -> float:
    """Estimate the cost of a round per row, in multiply-adds of matrix products.

    Args:
        kept: kept weights of a row.
        free: columns that may be exchanged.
        rows: rows of the layer's groups.
    """
    pool = pool_size(kept, free, rows)
    inside = pool - min(pool / 2, max(0.0, free - kept))
    fixed = max(0.0, kept - inside)
    eliminating = fixed**3 / 6 + fixed**2 * pool / 2 + fixed * pool**2
    return _ELIMINATING * eliminating + _SEARCHING * pool**3 + _ROW


class _Rows:
    """The rows of one group. `kept`, a mask (rows, d), is improved in place."""

    def __init__(
        self,
        problem: Problem,
        group: int,
        size: float,
        kept: Tensor,
        late: float | None,
        backend: kernels.Backend,
    ) -> None:
        metric, weight = problem.metrics[group], problem.groups[group][0]
        self.gram = metric.gram.to(sweep_dtype(metric, weight))
        self.linear = (metric.scaled(weight) / size).to(self.gram) @ self.gram
        self.kept, self.late, self.backend, self.name = kept, late, backend, problem.name
        self.processes = problem.context.group
        self.importance = problem.importance[group]
        self.free = weight.shape[1] - problem.protected  # columns that may be exchanged
        each = int(kept[:, : self.free].sum()) / max(1, len(kept))
        self.pool = pool_size(each, self.free, len(kept))
        self.active = torch.ones(len(kept), dtype=torch.bool, device=kept.device)
        self.independent = self._independence()
        support = int(kept.sum()) // max(1, len(kept))
        whole = self.gram.element_size() * (support * (support + self.pool) + self.pool**2)
        self.keeps_factors = whole * min(_TOGETHER, len(kept)) <= _BATCH_BYTES
        limit = problem.context.memory
        most = _BATCH_BYTES if limit is None else min(_BATCH_BYTES, limit.total // 16)
        self.batch = max(2, most // max(1, whole if self.keeps_factors else 8 * self.pool**2))

    @property
    def complete(self) -> bool:
        """Whether every pool holds all columns, so that one round finds all there is."""
        return self.pool == self.free

    def exchange(self, values: Tensor) -> tuple[float, float]:
        """Run one round of swaps and trades; update `values` where factors are kept.

        Returns the number of moves and how much they lowered the error. Batches are independent, so
        several processes take turns at them.
        """
        pools, among, moves, gained = self._pools(values), self.processes, 0.0, 0.0
        active = self.active.nonzero().squeeze(1)
        batches = torch.tensor_split(active, max(1, -(-len(active) // self.batch)))
        for rows in batches[among.rank :: among.size]:
            if self.late is not None and time.perf_counter() > self.late:
                break
            done = self._batch(rows, pools[rows], values)
            moves, gained = moves + done[0], gained + done[1]
        if among.size == 1:
            return moves, gained
        for turn, rows in enumerate(batches):
            state = self.kept[rows], self.active[rows], values[rows]
            among.broadcast(*state, by=turn % among.size)
            self.kept[rows], self.active[rows], values[rows] = state
        moves, gained = among.sum_numbers(moves, gained)
        return moves, gained

    def _pools(self, values: Tensor) -> Tensor:
        """Return the weakest columns inside and the most wanted outside, as indices."""
        values = values.to(self.gram)
        residual = self.linear - values @ self.gram
        kept = self.kept[:, : self.free]
        weakness = torch.where(
            kept, -(values.square() * self.independent)[:, : self.free], -torch.inf
        )
        wanted = torch.where(
            kept, -torch.inf, (residual.square() / self.independent)[:, : self.free]
        )
        sides = torch.stack(
            [side.topk(self.pool, dim=1).indices for side in (weakness, wanted)], dim=2
        )
        # Equally many of both sides; where one is short, more of the other.
        real = torch.stack([kept.gather(1, sides[..., 0]), ~kept.gather(1, sides[..., 1])], dim=2)
        place = torch.arange(2 * self.pool, device=real.device).expand(len(real), -1)
        first = (
            torch.where(real.flatten(1), place, place + 2 * self.pool)
            .topk(self.pool, dim=1, largest=False)
            .indices
        )
        return sides.flatten(1).gather(1, first)

    def _independence(self) -> Tensor:
        """Estimate the share of each column's energy that a typical support cannot explain."""
        some = min(_TYPICAL, -(-len(self.kept) // _ENOUGH_ROWS))
        return typical_independence(self.gram.unsqueeze(0), self.kept.unsqueeze(0), some)[0]

    def _batch(self, rows: Tensor, pools: Tensor, values: Tensor) -> tuple[int, float]:
        kept, linear = self.kept[rows], self.linear[rows]
        square = self.gram.new_empty(len(pools), self.pool, self.pool)
        left = self.gram.new_empty(len(pools), self.pool)
        fixed = kept.scatter(1, pools, torch.zeros_like(pools, dtype=torch.bool))
        factors: list[tuple[Tensor, Tensor, Tensor, linalg.Eliminated]] = []

        def reduce(part: Tensor) -> None:
            index, real = listed(fixed[part])
            rest = _eliminated(self.gram, linear[part], index, real, pools[part])
            explained = rest.explained.to(self.gram)
            square[part] = restrict(self.gram, pools[part], pools[part]) - explained[:, :-1, :-1]
            left[part] = linear[part].gather(1, pools[part]) - explained[:, :-1, -1]
            if self.keeps_factors:
                factors.append((part, index, real, rest))

        by_rows(reduce, fixed.sum(dim=1), self.pool)
        inside = kept.gather(1, pools)
        moves, gained = kernels.improve(
            square,
            left,
            inside,
            self.importance[rows].to(left),
            backend=self.backend,
            label=f"swaps {self.name}",
        )
        self.kept[rows] = kept.scatter(1, pools, inside)
        # A row without a move in this round will hardly make one in the next.
        self.active[rows] = (inside != kept.gather(1, pools)).any(dim=1)
        # Inside the support, the remaining linear term is the weight itself.
        of_pool = torch.where(inside, left, 0.0)
        for part, index, real, rest in factors:
            best = torch.zeros_like(linear[part]).scatter_(1, pools[part], of_pool[part])
            best.scatter_add_(1, index, (rest.values(of_pool[part]) * real).to(best))
            values[rows[part]] = best.to(values)
        return moves, float((gained * self.importance[rows].to(gained)).sum())


def _eliminated(
    gram: Tensor, linear: Tensor, index: Tensor, real: Tensor, pool: Tensor
) -> linalg.Eliminated:
    """Eliminate the listed columns of every row, which leaves a problem in the pool's columns."""
    lines = _lines(gram, linear, index, real, pool)
    rest = linalg.Eliminated.from_lines(lines)
    if rest is None:  # float32 cannot hold a nearly singular block
        rest = linalg.Eliminated.from_lines(_lines(gram, linear, index, real, pool).double())
    assert rest is not None  # in float64 it raises instead
    return rest


def _lines(gram: Tensor, linear: Tensor, index: Tensor, real: Tensor, pool: Tensor) -> Tensor:
    """Return G_FF over [G_FU c_F]ᵀ of every row, for its listed columns F and pool U."""
    last = pool[:, :1]  # reserves the line of c_F
    lines = restrict(gram, torch.cat([index, pool, last], dim=1), index)
    lines[:, -1] = linear.gather(1, index)
    pad_with_identity(lines, real)
    return lines
