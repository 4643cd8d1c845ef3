"""N:M patterns: alternating directions, then swaps within groups.

Small layers, where a start is a matter of chance, are also started from exact greedy OBS in which a
group stops giving when it has given its share. Rows are independent under such a pattern, so each
takes whichever left it the smaller error, on Ψ + λI where Ψ is damped, and keeps what it had where
swaps, for rounding, did not help. Swaps cost rows·d³/4 multiply-adds; very wide layers go without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.solvers import kernels
from lobs.solvers.kernels import Quota
from lobs.solvers.least_squares import least_squares, on_support, sweep_dtype
from lobs.solvers.metric import Metric
from lobs.solvers.patterns.group_swaps import swap_within_groups
from lobs.solvers.patterns.nbym_admm import Keeper, admm_mask
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution
from lobs.targets import NByM

Method: TypeAlias = Literal["auto", "greedy", "admm"]

# rows·d³ up to which each is worth its time: milliseconds, and about half a minute on two cores.
GREEDY_UP_TO = 3e8
SWAPS_UP_TO = 5e12
# Below this independence float32 takes rounding for gains: swaps follow one another, and each
# inherits the digits lost before.
_SINGLE_PRECISION_SWAPS = 5e-3
# Of the mean energy: an input below it is nearly dead, and this much damping keeps its weights
# where they were.
_QUIET = 1e-5


def solve_nbym(
    problem: Problem,
    target: NByM,
    *,
    backend: kernels.Backend = "auto",
    method: Method = "auto",
    swaps: bool = True,
) -> Solution:
    """Keep n of every m: "greedy" and "admm" take that mask alone, with swaps; "auto" takes what it can afford."""
    problem = _steadied(problem)
    quota = quota_of(problem, target)
    rows, d = problem.weight.shape[-2:]
    greedy = method == "greedy" or (method == "auto" and rows * d**3 <= GREEDY_UP_TO)
    swaps = swaps and (method != "auto" or rows * d**3 <= SWAPS_UP_TO)
    masks, values = [], []
    for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
        first = []
        if greedy:
            first.append(
                greedy_mask(
                    metric, weight, quota, backend=backend, label=f"{target} {problem.name}"
                )
            )
        if method != "greedy":
            first.append(admm_mask(metric.gram, metric.scaled(weight), quota))
        mask, best = _better_rows(metric, weight, *first)
        if swaps:
            kind = sweep_dtype(metric, weight)
            if (
                problem.units is None and metric.independence < _SINGLE_PRECISION_SWAPS
            ):  # wide ones have room for one matrix
                kind = torch.float64
            gram, scaled = metric.gram.to(kind), metric.scaled(weight).to(kind)
            swapped = swap_within_groups(gram, scaled, mask, quota.group, backend=backend)
            mask, best = _better_rows(metric, weight, mask, swapped)
        masks.append(mask)
        values.append(best)
    ways = ["greedy"] * greedy + ["admm"] * (method != "greedy") + ["swaps"] * swaps
    known = [best for best in values if best is not None]
    near = torch.stack(known) if len(known) == len(masks) else None
    solution = on_support(problem, torch.stack(masks).view(problem.weight.shape), near)
    return replace(solution, status=f"ok ({target} by {' + '.join(ways)})")


def _steadied(problem: Problem) -> Problem:
    """Damp a problem with nearly dead inputs, unless its owner has.

    Every group keeps its share, also where all its inputs are nearly dead: least squares would give
    those enormous weights for the last digits of the calibration data, and the first livelier
    sample would pay for it.
    """
    if (
        problem.damping is not None or problem.units is not None
    ):  # wide problems are steady from the start
        return problem
    energy = problem.moment.to(torch.float64).diagonal(dim1=-2, dim2=-1)
    alive = energy[energy > 0]
    quiet = _QUIET * float(energy.mean())
    if not len(alive) or float(alive.min()) >= quiet:
        return problem
    return replace(problem, damping=max(quiet, *(metric.damping for metric in problem.metrics)))


def quota_of(problem: Problem, target: NByM) -> Quota:
    """The pattern as groups of columns and what each gives; a protected bias column belongs to none, −1."""
    free = problem.weight.shape[-1] - problem.protected
    group = torch.tensor([*target.groups(free, problem.positions), *[-1] * problem.protected])
    allowed = [target.quota(int(size)) for size in group[:free].bincount()]
    return Quota(group, torch.tensor(allowed, dtype=torch.int64))


def largest_of_groups(values: Tensor, quota: Quota) -> Tensor:
    """Keep, in every group of every row, the largest that the quota leaves."""
    return Keeper(quota, values.device)(values.flatten(0, -2)).view(values.shape)


def greedy_mask(
    metric: Metric, weight: Tensor, quota: Quota, *, backend: kernels.Backend, label: str
) -> Tensor:
    """Exact greedy OBS until every group has given its share."""
    d = weight.shape[1]
    protected = int((quota.group < 0).sum())
    to_front = torch.arange(d).roll(protected)  # kernels want the protected columns first
    one_more = len(quota.allowed)  # they become a group that gives nothing
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
    """Of several masks the one, for each row, on which the best weights leave the smaller error, and these; of one only it."""
    if len(masks) == 1:
        return masks[0], None
    w = metric.scaled(weight)
    found = torch.stack([least_squares(metric.gram, w, mask) for mask in masks])
    errors = ((found - w) @ metric.gram * (found - w)).sum(dim=-1)
    best = errors.argmin(dim=0), torch.arange(len(w), device=w.device)
    return torch.stack(masks)[best], found[best]
