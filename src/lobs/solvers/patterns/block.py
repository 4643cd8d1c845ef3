"""Group OBS: remove whole blocks of columns, each at its exact loss, with a downdated inverse.

A *stripe* is a set of rows that always lose the same columns: one row for 1×k blocks, k rows for
k×k, all rows where input channels go. Its rows share one inverse A. Removing block B costs
Σ_rows w_B [A_BB]⁻¹ w_Bᵀ. Stripes are independent, as rows are for single weights. Each yields an
order and a loss per step. A running maximum and one sort across stripes give the layer's mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lobs._system.progress import track
from lobs.solvers import linalg
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.kernels import Backend
from lobs.solvers.least_squares import on_support
from lobs.solvers.metric import Metric
from lobs.solvers.patterns import PatternSolver
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, mask_from_order, removal_order
from lobs.targets import Block

_BATCH_ELEMENTS = 2**25  # entries of factors in memory at a time: 256 MB in float64


def solve_blocks(problem: Problem, target: Block, backend: Backend = "auto") -> Solution:
    """Remove the target's share of blocks.

    Takes d³/2 multiply-adds per stripe for any share, and memory of d² for each stripe of a batch.

    Args:
        problem: the layer problem.
        target: the shape of blocks and the share to remove.
        backend: unused; there is one implementation.
    """
    path = block_path(problem, *target.shape)
    return path.cut(target.count(path.losses.numel()))


@dataclass(frozen=True, eq=False)
class BlockPath:
    """A whole run of group OBS, from which any number of blocks can be cut.

    Args:
        problem: the layer problem.
        order: `order[g, s, t]` is the t-th block that stripe s of group g loses.
        losses: the cost of each of these removals.
        high: rows of a block.
        wide: columns of a block.
    """

    problem: Problem
    order: Tensor
    losses: Tensor
    high: int
    wide: int

    @cached_property
    def _ranking(self) -> Tensor:
        return removal_order(self.losses.cummax(dim=-1).values)

    @cached_property
    def curve(self) -> Tensor:
        """The error with k blocks removed, damping included."""
        return torch.cat([self.losses.new_zeros(1), self.losses.flatten()[self._ranking].cumsum(0)])

    def mask_at(self, count: int) -> Tensor:
        """Return the mask with `count` blocks removed, in the weight's shape."""
        kept = mask_from_order(self._ranking, count, tuple(self.losses.shape))
        weight = self.problem.weight
        rows, free = weight.shape[-2], weight.shape[-1] - self.problem.protected
        blocks = torch.ones(
            (*kept.shape[:2], -(-free // self.wide)), dtype=torch.bool, device=weight.device
        )
        blocks.scatter_(-1, self.order, kept)
        tiles = blocks.repeat_interleave(self.high, dim=1).repeat_interleave(self.wide, dim=2)
        mask = torch.ones((len(blocks), *weight.shape[-2:]), dtype=torch.bool, device=weight.device)
        mask[..., :free] = tiles[:, :rows, :free]
        return mask.view(weight.shape)

    def cut(self, count: int) -> Solution:
        """Return the solution with `count` blocks removed."""
        return on_support(self.problem, self.mask_at(count))


def block_path(problem: Problem, high: int, wide: int, steps: int | None = None) -> BlockPath:
    """Run group OBS.

    Args:
        problem: the layer problem.
        high: rows of a block.
        wide: columns of a block.
        steps: removals in every stripe; None for all.
    """
    orders, losses = [], []
    for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
        order, loss = _stripes(problem, metric, weight, (high, wide), steps)
        orders.append(order)
        losses.append(loss)
    return BlockPath(problem, torch.stack(orders), torch.stack(losses), high, wide)


def _stripes(
    problem: Problem, metric: Metric, weight: Tensor, shape: tuple[int, int], steps: int | None
) -> tuple[Tensor, Tensor]:
    """Return the order and losses of all stripes of one group."""
    high, wide = shape
    rows, d = weight.shape
    free = d - problem.protected
    blocks = -(-free // wide)
    # Padding: columns that nothing depends on and rows of zeros, which cost and change nothing.
    extra = blocks * wide - free
    a = torch.eye(d + extra, dtype=torch.float64, device=weight.device)
    place = torch.arange(d, device=weight.device)
    place[free:] += extra
    a[place.unsqueeze(1), place] = metric.inverse.to(a)  # a wide layer's is in float32
    high = min(high, rows)
    count = -(-rows // high)
    w = a.new_zeros(count * high, d + extra)
    w[:rows, place] = metric.scaled(weight).to(w)
    w = w.view(count, high, d + extra)
    steps = blocks if steps is None else min(steps, blocks)
    batch = max(1, _BATCH_ELEMENTS // max(1, steps * wide * d))
    parts = []
    with track(f"blocks {problem.name}", count) as advance:
        for start in range(0, count, batch):
            part = w[start : start + batch].clone()
            parts.append(greedy_blocks(a, part, blocks, wide, steps))
            advance(len(part))
    return torch.cat([order for order, _ in parts]), torch.cat([loss for _, loss in parts])


def greedy_blocks(
    a: Tensor, w: Tensor, blocks: int, wide: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Remove blocks greedily. Left-looking: only the rows of A that are needed are formed."""
    stripes, high, d = w.shape
    free, every = blocks * wide, torch.arange(stripes, device=w.device)
    tiles = (
        a[:free, :free]
        .reshape(blocks, wide, blocks, wide)
        .diagonal(dim1=0, dim2=2)
        .permute(2, 0, 1)
    )
    own = tiles.expand(stripes, blocks, wide, wide).clone()
    gone = torch.zeros(stripes, blocks, dtype=torch.bool, device=w.device)
    factor = w.new_zeros(stripes, steps * wide, d)
    order = torch.empty(stripes, steps, dtype=torch.int64, device=w.device)
    losses = w.new_empty(stripes, steps)
    for t in range(steps):
        cost = linalg.block_costs(
            own, w[..., :free].view(stripes, high, blocks, wide).transpose(1, 2)
        )
        losses[:, t], b = torch.where(gone, torch.inf, cost).min(dim=1)
        order[:, t] = b
        columns = b.unsqueeze(1) * wide + torch.arange(wide, device=w.device)
        done = factor[:, : t * wide]
        lines = a[columns] - done.gather(2, columns.unsqueeze(1).expand(-1, t * wide, -1)).mT @ done
        u = linalg.solve_lower(own[every, b], lines)
        step = linalg.solve_lower(
            own[every, b], w.gather(2, columns.unsqueeze(1).expand(-1, high, -1)).mT
        )
        w -= step.mT @ u
        within = u[..., :free].view(stripes, wide, blocks, wide).transpose(1, 2)
        own -= within.mT @ within
        factor[:, t * wide : (t + 1) * wide] = u
        gone[every, b] = True
        # An identity keeps the factorisations of removed blocks defined.
        own[gone] = torch.eye(wide, dtype=w.dtype, device=w.device)
    return order, losses


def _seconds(shape: ProblemShape) -> float:
    """Estimate the time of all stripes."""
    assert isinstance(shape.target, Block)
    stripes = shape.groups * -(-shape.rows // shape.target.shape[0])
    return COSTS.blocks * stripes * shape.columns**3 / 2e9


SOLVER = PatternSolver(solve_blocks, _seconds)
