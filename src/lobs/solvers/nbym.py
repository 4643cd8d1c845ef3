"""N:M patterns: exact greedy OBS in which a group stops giving when it has given its share, then swaps within groups."""

from __future__ import annotations

import torch
from torch import Tensor

from lobs import kernels
from lobs.kernels import Quota
from lobs.linalg import Metric
from lobs.problem import Problem, Solution
from lobs.solvers.support import on_support
from lobs.solvers.swaps import swap_within_groups
from lobs.targets import NByM


def quota_of(problem: Problem, target: NByM) -> Quota:
    """The pattern as groups of columns and what each gives; a protected bias column is a group of its own and gives nothing."""
    free = problem.weight.shape[-1] - problem.protected
    group = torch.tensor([*target.groups(free, problem.positions), *[-1] * problem.protected])
    sizes = group[:free].bincount()
    return Quota(group, torch.tensor([target.quota(int(size)) for size in sizes], dtype=torch.int64))


def greedy_mask(metric: Metric, weight: Tensor, quota: Quota, dtype, backend="auto", label="x"):
    protected = int((quota.group < 0).sum())
    d = len(quota.group)
    to_front = torch.arange(d).roll(protected)
    group = quota.group[to_front].clone()
    group[:protected] = len(quota.allowed)
    allowed = torch.cat([quota.allowed, torch.zeros(1, dtype=torch.int64)])
    order, losses = kernels.greedy(metric.inverse[to_front][:, to_front].to(dtype), metric.scaled(weight)[:, to_front], protected, Quota(group, allowed), backend=backend, label=label)
    columns = to_front[order.long()]
    mask = torch.ones(weight.shape, dtype=torch.bool)
    return mask.scatter_(1, columns, False)
