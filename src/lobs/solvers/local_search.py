r"""Swaps: make a support better by exchanging weights until no exchange helps.

For one row with support S, only the weakest weights inside and the most wanted outside can take
part in a useful swap. They form the row's pool U. Eliminating the rest, F = S \\ U, which always
takes its best values, leaves an exact least-squares problem in the |U| variables of the pool, small
enough to look at *every* add-one-drop-one swap, with all surviving weights re-optimised; and rows
trade with each other (`kernels.improve`). So the error never grows. A round costs a Cholesky of
|S|³/3 flops and |S|²·|U| a row: at 90 % sparsity a hundredth of the exact greedy's d³/3. The
factors also give the row's best weights.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.solvers import kernels, linalg
from lobs.solvers.kernels.rows import apart, by_rows, listed, restrict
from lobs.solvers.least_squares import single_precision, stacked, typical_independence
from lobs.solvers.problem import Problem

_POOL = 128  # at most so many on either side; more finds little more
_LEAST_POOL = 32
_SHARE = 3  # times the root of what a row keeps: more find more, but what they cost grows faster
# What a round takes, in multiply-adds of a product that take as long: by those of the elimination,
# by a pool's cube, by row.
_ELIMINATING, _SEARCHING, _ROW = 1.5, 3, 1e6
_ENOUGH = 0.1  # moves a row below which another round is not worth its factorisations
_BATCH_BYTES = 2**29  # of pools, and of factors where at least _TOGETHER rows' fit
_TOGETHER = 64
_TYPICAL, _ENOUGH_ROWS = 4, 16  # so many supports stand for all, but only one of so many
_STEPS = 15  # conjugate gradient steps for values that only the choice of pools depends on
_FEW = 5  # where they start near


class Exchanged(NamedTuple):
    """A mask with as many kept, weights at or near its best, and what the first round of swaps took off the weighted error.

    Weights are (groups, rows, d) in equilibrated units.
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
    """Exchange weights of a support for better ones, starting `near` its best, in the units of what is given back.

    Stops when a round moves next to nothing, after `rounds`, or when `seconds` are over.
    """
    late = None if seconds is None else time.perf_counter() + seconds
    gram, weight = stacked(problem)
    # Errors are squares, which float32 holds for weights near 1 only.
    size = float(weight.abs().amax()) if weight.numel() else 0.0
    size = size if size > 0 else 1.0
    weight = weight / size
    kept = mask.view(weight.shape).clone(memory_format=torch.contiguous_format)
    process_group().broadcast(
        kept
    )  # another kind of processor may have chosen otherwise where two weights are as good
    groups = [_Rows(problem, g, size, kept[g], late, backend) for g in range(len(weight))]
    values, first = weight if near is None else near / size, 0.0
    for turn in range(max(1, rounds)):
        if turn == 0 or not all(group.remembers for group in groups):
            steps = _STEPS if near is None or turn else _FEW
            values = linalg.conjugate_gradients(
                gram, weight, kept, values.to(weight), steps=steps, tolerance=1e-2
            )
            values = values.to(problem.metrics[0].gram.dtype)
        found = [group.exchange(v) for group, v in zip(groups, values, strict=True)]
        moves, gained = (sum(kind) for kind in zip(*found, strict=True))
        first = first if turn else gained
        if moves <= _ENOUGH * weight[..., 0].numel() or all(group.complete for group in groups):
            break
        if late is not None and process_group().all_gather(time.perf_counter() > late)[0]:
            break
    return Exchanged(kept.view(mask.shape), values.mul_(size), first * size**2)


def pool_size(kept: float, free: int) -> int:
    """How many of a row's free columns a round looks at when so many are kept: about as many inside as outside."""
    return min(2 * max(_LEAST_POOL, min(_POOL, int(_SHARE * kept**0.5))), free)


def round_work(kept: float, free: int) -> float:
    """About how many multiply-adds of matrix products a round takes as long as, per row."""
    pool = pool_size(kept, free)
    inside = pool - min(pool / 2, max(0.0, free - kept))
    fixed = max(0.0, kept - inside)
    eliminating = fixed**3 / 6 + fixed**2 * pool / 2 + fixed * pool**2
    return _ELIMINATING * eliminating + _SEARCHING * pool**3 + _ROW


class _Rows:
    """The rows of one group and the exchange among them; `kept`, a mask (rows, d), is improved in place."""

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
        self.gram = metric.gram.to(
            torch.float32 if single_precision(metric, weight) else torch.float64
        )
        self.linear = (metric.scaled(weight) / size).to(self.gram) @ self.gram
        self.kept, self.late, self.backend, self.name = kept, late, backend, problem.name
        self.importance = problem.importance[group]
        self.free = weight.shape[1] - problem.protected  # columns that may come and go
        self.pool = pool_size(int(kept[:, : self.free].sum()) / max(1, len(kept)), self.free)
        self.active = torch.ones(len(kept), dtype=torch.bool, device=kept.device)
        self.independent = self._independence()
        support = int(kept.sum()) // max(1, len(kept))
        whole = self.gram.element_size() * (support * (support + self.pool) + self.pool**2)
        self.remembers = whole * min(_TOGETHER, len(kept)) <= _BATCH_BYTES
        limit = memory.limit()
        bytes_ = _BATCH_BYTES if limit is None else min(_BATCH_BYTES, limit // 16)
        self.batch = max(2, bytes_ // max(1, whole if self.remembers else 8 * self.pool**2))

    @property
    def complete(self) -> bool:
        """Does every pool hold all columns, so that one round finds all there is?"""
        return self.pool == self.free

    def exchange(self, values: Tensor) -> tuple[float, float]:
        """One round of swaps in every row and trades among them; updates `values` if it can.

        Returns the number of moves and what they took off the error. Batches know nothing of each
        other, so several processes take turns at them.
        """
        pools, group, moves, gained = self._pools(values), process_group(), 0.0, 0.0
        active = self.active.nonzero().squeeze(1)
        batches = torch.tensor_split(active, max(1, -(-len(active) // self.batch)))
        for rows in batches[group.rank :: group.size]:
            if self.late is not None and time.perf_counter() > self.late:
                break
            done = self._batch(rows, pools[rows], values)
            moves, gained = moves + done[0], gained + done[1]
        if group.size == 1:
            return moves, gained
        for turn, rows in enumerate(batches):
            told = self.kept[rows], self.active[rows], values[rows]
            group.broadcast(*told, by=turn % group.size)
            self.kept[rows], self.active[rows], values[rows] = told
        moves, gained = group.sum_numbers(moves, gained)
        return moves, gained

    def _pools(self, values: Tensor) -> Tensor:
        """The weakest inside and the most wanted outside, as column numbers."""
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
        # Both sides equally, as far as they reach; where one is short, more of the other.
        real = torch.stack([kept.gather(1, sides[..., 0]), ~kept.gather(1, sides[..., 1])], dim=2)
        place = torch.arange(2 * self.pool, device=real.device).expand(len(real), -1)
        first = (
            torch.where(real.flatten(1), place, place + 2 * self.pool)
            .topk(self.pool, dim=1, largest=False)
            .indices
        )
        return sides.flatten(1).gather(1, first)

    def _independence(self) -> Tensor:
        """For every column, about which share of its energy a typical support cannot explain."""
        some = min(_TYPICAL, -(-len(self.kept) // _ENOUGH_ROWS))
        return typical_independence(self.gram.unsqueeze(0), self.kept.unsqueeze(0), some)[0]

    def _batch(self, rows: Tensor, pools: Tensor, values: Tensor) -> tuple[int, float]:
        kept, linear = self.kept[rows], self.linear[rows]
        square = self.gram.new_empty(len(pools), self.pool, self.pool)
        left = self.gram.new_empty(len(pools), self.pool)
        fixed = kept.scatter(1, pools, torch.zeros_like(pools, dtype=torch.bool))
        memory: list[tuple[Tensor, Tensor, Tensor, linalg.Eliminated]] = []

        def reduce(part: Tensor) -> None:
            index, real = listed(fixed[part])
            rest = _eliminated(self.gram, linear[part], index, real, pools[part])
            explained = rest.explained.to(self.gram)
            square[part] = restrict(self.gram, pools[part], pools[part]) - explained[:, :-1, :-1]
            left[part] = linear[part].gather(1, pools[part]) - explained[:, :-1, -1]
            if self.remembers:
                memory.append((part, index, real, rest))

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
        # A row that found nothing to change will hardly find something in the next round.
        self.active[rows] = (inside != kept.gather(1, pools)).any(dim=1)
        # What is left of the linear term is, inside, the weight itself.
        of_pool = torch.where(inside, left, 0.0)
        for part, index, real, rest in memory:
            best = torch.zeros_like(linear[part]).scatter_(1, pools[part], of_pool[part])
            best.scatter_add_(1, index, (rest.values(of_pool[part]) * real).to(best))
            values[rows[part]] = best.to(values)
        return moves, float((gained * self.importance[rows].to(gained)).sum())


def _eliminated(
    gram: Tensor, linear: Tensor, index: Tensor, real: Tensor, pool: Tensor
) -> linalg.Eliminated:
    """Take the listed columns of every row out of its least-squares problem, for the pool's columns to decide."""
    lines = _lines(gram, linear, index, real, pool)
    # float32 can lose a nearly singular block that float64 holds
    return linalg.Eliminated.from_lines(lines) or _held(_lines(gram, linear, index, real, pool))


def _held(lines: Tensor) -> linalg.Eliminated:
    rest = linalg.Eliminated.from_lines(lines.double())
    assert rest is not None  # float64 says so itself
    return rest


def _lines(gram: Tensor, linear: Tensor, index: Tensor, real: Tensor, pool: Tensor) -> Tensor:
    """Every row's moments of the listed columns with these, the pool's and what is wanted."""
    last = pool[:, :1]  # a line to be overwritten
    lines = restrict(gram, torch.cat([index, pool, last], dim=1), index)
    lines[:, -1] = linear.gather(1, index)
    apart(lines, real)
    return lines
