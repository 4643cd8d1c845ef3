"""N:M patterns: ADMM, then swaps within groups.

Small layers also start from greedy OBS in which every group loses its share and no more: their
result depends much on the start. Rows are independent under such a pattern, so each takes the start
with the smaller error, on Ψ + λI where Ψ is damped. A row keeps its mask where swaps did not help.
Swaps take rows·d³/4 multiply-adds. Very wide layers go without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.solvers import kernels
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.kernels import Quota
from lobs.solvers.least_squares import least_squares, on_support, sweep_dtype
from lobs.solvers.metric import Metric
from lobs.solvers.patterns import ColumnChoice, PatternSolver
from lobs.solvers.patterns.group_swaps import swap_within_groups
from lobs.solvers.patterns.nbym_admm import PATTERN_ADMM, Keeper, admm_mask
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution
from lobs.targets import NByM

Method: TypeAlias = Literal["auto", "greedy", "admm"]

# rows·d³ up to which the greedy start and the swaps are run: milliseconds, and about half a minute
# on two cores. Before a refit, swaps may take a tenth of that.
_GREEDY_UP_TO = 3e8
_SWAPS_UP_TO, _BEFORE_REFIT_UP_TO = 5e12, 5e11
# Below this independence swaps need float64: each inherits the digits lost before.
_SINGLE_PRECISION_SWAPS = 5e-3
# An input below this share of the mean energy is nearly dead. Damping by as much keeps its weights.
_QUIET = 1e-5


def solve_nbym(
    problem: Problem,
    target: NByM,
    backend: kernels.Backend = "auto",
    *,
    method: Method = "auto",
    swaps: bool = True,
    refitted: bool = False,
) -> Solution:
    """Keep n of every m weights.

    Args:
        problem: the layer problem.
        target: the pattern.
        backend: which kernels to use.
        method: "greedy" or "admm" for that start alone, "auto" for both where both are affordable.
        swaps: improve the mask by swaps within groups.
        refitted: the layer's block is refitted afterwards.
    """
    problem = _steadied(problem)
    quota = quota_of(problem, target)
    rows, d = problem.weight.shape[-2:]
    greedy = method == "greedy" or (method == "auto" and rows * d**3 <= _GREEDY_UP_TO)
    most = _BEFORE_REFIT_UP_TO if refitted else _SWAPS_UP_TO
    swaps = swaps and (method != "auto" or rows * d**3 <= most)
    masks, values = [], []
    for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
        starts = []
        if greedy:
            label = f"{target} {problem.name}"
            starts.append(greedy_mask(metric, weight, quota, backend=backend, label=label))
        if method != "greedy":
            starts.append(admm_mask(metric.gram, metric.scaled(weight), quota, problem.context))
        mask, best = _better_rows(metric, weight, *starts)
        if swaps:
            swapped = _swapped(problem, metric, weight, mask, quota, backend)
            mask, best = _better_rows(metric, weight, mask, swapped)
        masks.append(mask)
        values.append(best)
    ways = ["greedy"] * greedy + ["admm"] * (method != "greedy") + ["swaps"] * swaps
    known = [best for best in values if best is not None]
    near = torch.stack(known) if len(known) == len(masks) else None
    solution = on_support(problem, torch.stack(masks).view(problem.weight.shape), near)
    return replace(solution, status=f"ok ({target} by {' + '.join(ways)})")


def _swapped(
    problem: Problem,
    metric: Metric,
    weight: Tensor,
    mask: Tensor,
    quota: Quota,
    backend: kernels.Backend,
) -> Tensor:
    kind = sweep_dtype(metric, weight)
    # A wide layer has room for one matrix only, so it stays in single precision.
    if problem.units is None and metric.independence < _SINGLE_PRECISION_SWAPS:
        kind = torch.float64
    gram, scaled = metric.gram.to(kind), metric.scaled(weight).to(kind)
    return swap_within_groups(gram, scaled, mask, quota.group, backend=backend)


def _steadied(problem: Problem) -> Problem:
    """Damp a problem with nearly dead inputs, unless the caller chose the damping.

    Every group keeps its share, even where all its inputs are nearly dead. Least squares would fit
    enormous weights to the last digits of the calibration data, and new samples would suffer.
    """
    # Wide problems are damped from the start.
    if problem.damping is not None or problem.units is not None:
        return problem
    energy = problem.moment.to(torch.float64).diagonal(dim1=-2, dim2=-1)
    alive = energy[energy > 0]
    quiet = _QUIET * float(energy.mean())
    if not len(alive) or float(alive.min()) >= quiet:
        return problem
    return replace(problem, damping=max(quiet, *(metric.damping for metric in problem.metrics)))


def quota_of(problem: Problem, target: NByM) -> Quota:
    """Return the columns' groups and how many each loses; a bias column has group −1."""
    free = problem.weight.shape[-1] - problem.protected
    group = torch.tensor([*target.groups(free, problem.positions), *[-1] * problem.protected])
    allowed = [target.quota(int(size)) for size in group[:free].bincount()]
    return Quota(group, torch.tensor(allowed, dtype=torch.int64))


def largest_of_groups(values: Tensor, quota: Quota) -> Tensor:
    """Return the mask of the largest values of every group of every row."""
    return Keeper(quota, values.device)(values.flatten(0, -2)).view(values.shape)


def greedy_mask(
    metric: Metric, weight: Tensor, quota: Quota, *, backend: kernels.Backend, label: str
) -> Tensor:
    """Return the mask of greedy OBS, run until every group has lost its share.

    Args:
        metric: the prepared moment.
        weight: the rows' weights.
        quota: the pattern.
        backend: which kernels to use.
        label: name of the work in progress bars.
    """
    d = weight.shape[1]
    protected = int((quota.group < 0).sum())
    to_front = torch.arange(d).roll(protected)  # kernels expect protected columns first
    one_more = len(quota.allowed)  # the protected columns form a group that loses nothing
    group = quota.group[to_front]
    shares = Quota(
        torch.where(group < 0, one_more, group),
        torch.cat([quota.allowed, quota.allowed.new_zeros(1)]),
    )
    to_front = to_front.to(weight.device)
    inverse = metric.inverse[to_front][:, to_front].to(sweep_dtype(metric, weight))
    order, _ = kernels.greedy(
        inverse, metric.scaled(weight)[:, to_front], protected, shares, backend=backend, label=label
    )
    mask = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    return mask.scatter_(1, to_front[order.long()], False)


def _better_rows(metric: Metric, weight: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return for each row the mask of least error, and the best weights on it.

    A single mask is returned without weights.
    """
    if len(masks) == 1:
        return masks[0], None
    w = metric.scaled(weight)
    found = torch.stack([least_squares(metric.gram, w, mask) for mask in masks])
    errors = ((found - w) @ metric.gram * (found - w)).sum(dim=-1)
    best = errors.argmin(dim=0), torch.arange(len(w), device=w.device)
    return torch.stack(masks)[best], found[best]


def broken_groups(weight: Tensor, target: NByM) -> int:
    """Count the groups of an n:m pattern with more than n non-zeros.

    `weight` has its rows first and the kernel positions of a convolution last.
    """
    rows = weight.detach().reshape(len(weight), -1)
    positions = math.prod(weight.shape[2:])
    group = torch.tensor(target.groups(rows.shape[1], positions), device=rows.device)
    sizes = group.bincount()
    kept = torch.zeros(len(rows), len(sizes), dtype=torch.int64, device=rows.device)
    kept.index_add_(1, group, (rows != 0).long())
    most = torch.tensor([n - target.quota(n) for n in sizes.tolist()], device=rows.device)
    return int((kept > most).sum())


def _mask_by_score(problem: Problem, target: NByM, scores: Tensor) -> Tensor:
    return largest_of_groups(scores, quota_of(problem, target))


@dataclass
class _ByGroup:
    """The share of every group; a step is the fewest columns of whole groups."""

    target: NByM
    positions: int
    keepers: dict[int, Keeper] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """See `ColumnChoice`."""
        return self.target.m * (1 if self.target.along == "columns" else self.positions)

    def kept(self, cost: Tensor) -> Tensor:
        """See `ColumnChoice`."""
        width = cost.shape[1]
        if width not in self.keepers:
            group = torch.tensor(self.target.groups(width, self.positions))
            allowed = [self.target.quota(int(size)) for size in group.bincount()]
            self.keepers[width] = Keeper(Quota(group, torch.tensor(allowed)), cost.device)
        return self.keepers[width](cost)


def _column_choice(problem: Problem, target: NByM) -> tuple[Problem, ColumnChoice]:
    return _steadied(problem), _ByGroup(target, problem.positions)


def _seconds(shape: ProblemShape) -> float:
    """Estimate the time of the starts and the swaps that are affordable."""
    d, rows = shape.columns, shape.groups * shape.rows
    work = shape.rows * d**3
    greedy = COSTS.greedy * rows * d**3 / 3e9
    runs = (work <= _GREEDY_UP_TO) + COSTS.group_swaps * (work <= _SWAPS_UP_TO)
    return PATTERN_ADMM.seconds(shape) + greedy * runs


SOLVER = PatternSolver(
    solve_nbym, _seconds, _mask_by_score, _column_choice, partial(solve_nbym, refitted=True)
)
