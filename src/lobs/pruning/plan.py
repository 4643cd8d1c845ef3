"""Allocate one budget for the whole network: how many weights does each layer lose?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lobs.errors import TargetError
from lobs.solvers import GreedyOBS, scores
from lobs.solvers.problem import Problem

_AFFORDABLE = 6e10  # multiply-adds of the greedy on one layer; beyond it rows are sampled
_FEWEST_ROWS = 4  # rows of such a sample, at least
_SIZED_ROWS = 64  # rows whose size and importance are looked at in any case, at least
LEAST_SHARE = 0.2  # of the network's kept fraction that a layer keeps, about


@dataclass(frozen=True)
class RowLosses:
    """What deletions cost in a sample of a layer's rows, step by step.

    Args:
        losses: (groups, sampled rows, steps), measured or scaled from similar rows.
        rows: indices of the sampled rows.
        of: number of rows in the layer.
        energy: mean squared output of the dense layer.
    """

    losses: Tensor
    rows: Tensor
    of: int
    energy: float

    @property
    def multiplicity(self) -> float:
        """Number of rows that each sampled row stands for."""
        return self.of / len(self.rows)

    def keys(self, importance: Tensor) -> Tensor:
        """Return sort keys that never fall along a row: the lowest goes first."""
        sampled = importance.to(self.losses)[:, self.rows].unsqueeze(-1)
        return self.losses.cummax(dim=-1).values * sampled

    def packed(self) -> dict[str, Tensor]:
        """Return all fields as tensors."""
        energy = torch.tensor(self.energy, dtype=torch.float64)
        return {
            "losses": self.losses,
            "rows": self.rows,
            "of": torch.tensor(self.of),
            "energy": energy,
        }

    @classmethod
    def unpacked(cls, parts: Mapping[str, Tensor]) -> RowLosses:
        """Return the losses from what `packed` returned."""
        return cls(parts["losses"], parts["rows"], int(parts["of"]), float(parts["energy"]))

    def curve(
        self,
        prunable: int,
        importance: Tensor,
        fewest: int = 0,
        most: int | None = None,
        price: float = 1.0,
    ) -> Curve:
        """Return the layer's curve.

        Args:
            prunable: number of weights that may go.
            importance: importance of each row, (groups, rows).
            fewest: number of weights that must go.
            most: number of weights that may go at most; None for all.
            price: what one weight is worth to the budget.
        """
        return Curve(
            self.keys(importance).flatten(), self.multiplicity, prunable, fewest, most, price
        )


@dataclass(frozen=True)
class Curve:
    """What a layer's weights cost, one after another.

    Args:
        keys: marginal errors in any order, weighted by the importance of their rows.
        multiplicity: number of weights that each key stands for, where rows were sampled.
        prunable: number of weights that may go.
        fewest: number of weights that must go.
        most: number of weights that may go at most; None for all.
        price: what one weight is worth to the budget.
    """

    keys: Tensor
    multiplicity: float
    prunable: int
    fewest: int = 0
    most: int | None = None
    price: float = 1.0


def row_losses(problem: Problem) -> RowLosses:
    """Return the greedy's losses on a layer, or on a sample of its rows where all cost too much.

    Rows are independent, so an even sample stands for all. Wide layers, where the greedy costs
    rows·d³/3, are run on as many rows as are affordable. Rows share the shape of their losses, but
    size and importance differ by orders of magnitude. So losses of further rows are composed: the
    shape of the nearest row, at their own size.
    """
    groups, rows, d = len(problem.groups), problem.weight.shape[-2], problem.weight.shape[-1]
    affordable = int(_AFFORDABLE / (groups * d**3 / 3))
    count = max(min(rows, _FEWEST_ROWS), min(rows, affordable))
    if count == rows:
        losses = GreedyOBS().path(problem).losses.cpu()
        return RowLosses(losses, torch.arange(rows), rows, problem.energy)
    picked = torch.linspace(0, rows - 1, count).round().long()
    shapes = GreedyOBS().path(problem.some_rows(picked.to(problem.weight.device))).losses.cpu()
    sized = torch.linspace(0, rows - 1, min(rows, max(count, _SIZED_ROWS))).round().long()
    size = _sizes(problem).to(shapes)
    parts = [_at_their_size(*group, picked, sized) for group in zip(shapes, size, strict=True)]
    return RowLosses(torch.stack(parts), sized, rows, problem.energy)


def _at_their_size(shapes: Tensor, size: Tensor, picked: Tensor, sized: Tensor) -> Tensor:
    """Return losses of the rows `sized`, each from the nearest of the rows `picked` with any.

    Args:
        shapes: losses of the picked rows.
        size: size of every row's losses.
        picked: rows that the greedy was run on.
        sized: rows whose losses are wanted.
    """
    alive = size[picked] > 0
    if not bool(alive.any()):
        return shapes.new_zeros(len(sized), shapes.shape[-1])
    near, losses = picked[alive], shapes[alive]
    like = (sized.unsqueeze(1) - near.unsqueeze(0)).abs().argmin(dim=1)
    return losses[like] * (size[sized] / size[near[like]]).unsqueeze(-1)


def _sizes(problem: Problem) -> Tensor:
    """Return the size of each row's losses, (groups, rows): the sum of its sensitivities.

    Where the inverse is not kept, it is the sum without a refit.
    """
    found = []
    for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
        plain = metric.known_inverse is None
        each = (
            metric.scaled(w).square() if plain else scores.obs(w, metric)
            for w in torch.split(weight, 1024)
        )
        free = weight.shape[-1] - problem.protected
        found.append(torch.cat([some[:, :free].sum(dim=-1) for some in each]))
    return torch.stack(found).cpu()


def with_floors(curves: Mapping[str, Curve], share: float = LEAST_SHARE) -> dict[str, Curve]:
    """Return curves by which no layer is emptied long before the others.

    Errors are predicted to first order. By that order a layer whose outputs matter little may lose
    all of its weights, such as the queries and keys of attention. Its errors are large then, and
    the prediction is void. So a layer's last weights become dearer: the fraction r of a layer goes
    only after the network has come down to r / `share`. Where the network keeps a fraction, each
    layer keeps about `share` times that fraction or more. Weights without any error still go first.

    The floors are part of the curves and do not depend on a budget. So one sort serves all budgets.

    Args:
        curves: the layers' error curves.
        share: smallest kept fraction of a layer, relative to that of the network.
    """
    limited = {name: _limited(c) for name, c in curves.items()}
    keys, order = torch.cat(list(limited.values())).sort(stable=True)
    each = [torch.full((len(limited[n]),), c.multiplicity).double() for n, c in curves.items()]
    lost = torch.cat(each)[order].cumsum(0)
    possible = int(keys.isfinite().sum())
    if not possible:
        return dict(curves)
    lost = lost / lost[-1]
    found = {}
    for (name, curve), own in zip(curves.items(), limited.values(), strict=True):
        kept = 1 - torch.arange(1, len(own) + 1) / len(own)
        level = torch.searchsorted(lost, 1 - (kept.double() / share).clamp_max(1))
        least = keys[level.clamp_max(possible - 1)]
        raised = (own > 0) & (own < least) & (kept < share)
        plain = curve.keys.sort().values
        floored = torch.where(raised, least * curve.price, plain.double())
        found[name] = replace(curve, keys=floored) if bool(raised.any()) else curve
    return found


def allocate(curves: Mapping[str, Curve], give: float) -> dict[str, int]:
    """Allocate removals worth `give` so that the summed, weighted error grows least at every step.

    Keys rise along each row. So one sort across all layers, by error per unit of price, is the
    order in which a network-wide greedy takes deletions. A layer's share is how many of its own
    fall before the cut. Where all prices are 1 the counts add up to `give` exactly, else to at
    least that.
    """
    return allocations(curves, [give])[0]


def reach(curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Return the least and the most worth that the limits per layer allow to go."""
    most = sum((c.prunable if c.most is None else c.most) * c.price for c in curves.values())
    return sum(c.fewest * c.price for c in curves.values()), most


def allocations(curves: Mapping[str, Curve], gives: Sequence[float]) -> list[dict[str, int]]:
    """Return `allocate` for several rising budgets from one sort."""
    for give in gives:
        _check_reach(curves, give)
    keys = torch.cat([_limited(c) for c in curves.values()])
    owner = torch.repeat_interleave(
        torch.arange(len(curves)), torch.tensor([len(c.keys) for c in curves.values()])
    )
    worth = torch.tensor([c.multiplicity * c.price for c in curves.values()], dtype=torch.float64)
    owner = owner[keys.sort(stable=True).indices]
    total = worth[owner].cumsum(0)
    cuts = torch.searchsorted(
        total, torch.tensor(gives, dtype=torch.float64) + 1e-6, right=True
    ).tolist()
    taken, shares = torch.zeros(len(curves), dtype=torch.int64), []
    for give, start, stop in zip(gives, [0, *cuts], cuts, strict=False):
        taken = taken + torch.bincount(owner[start:stop], minlength=len(curves))
        shares.append(_exact(curves, _counts(curves, taken.tolist()), give))
    return shares


def _check_reach(curves: Mapping[str, Curve], give: float) -> None:
    """Refuse a budget that the limits per layer cannot meet."""
    forced, most = reach(curves)
    counted = all(c.price == 1 for c in curves.values())
    if give <= most + 1e-6 and (forced <= max(give, 0) + 1e-6 or not counted):
        return
    limited = any(
        c.fewest or (c.most or 0) < c.prunable for c in curves.values() if c.most is not None
    )
    what = "weights" if counted else "worth (bytes or operations)"
    remedy = (
        "Loosen keep_at_least or keep_at_most."
        if limited
        else "The budget is smaller than what cannot be pruned."
    )
    raise TargetError(
        f"between {forced:,.0f} and {most:,.0f} {what} can go, but {give:,.0f} must. {remedy}"
    )


def _counts(curves: Mapping[str, Curve], taken: Sequence[int]) -> dict[str, int]:
    return {
        name: max(
            c.fewest, min(c.prunable if c.most is None else c.most, round(n * c.multiplicity))
        )
        for (name, c), n in zip(curves.items(), taken, strict=True)
    }


def _limited(curve: Curve) -> Tensor:
    """Return a layer's keys per unit of price, forced ones first and forbidden ones last."""
    keys = curve.keys.to(torch.float64).sort().values / curve.price
    place = torch.arange(1, len(keys) + 1) * curve.multiplicity
    keys = torch.where(place <= curve.fewest, -1.0, keys)
    return keys if curve.most is None else torch.where(place > curve.most, torch.inf, keys)


def _exact(curves: Mapping[str, Curve], counts: dict[str, int], give: float) -> dict[str, int]:
    """Correct counts for what sampling and rounding left over, largest layers first."""
    exact = all(c.price == 1 for c in curves.values())
    for name, c in sorted(curves.items(), key=lambda item: -item[1].prunable):
        short = give - sum(counts[n] * curves[n].price for n in curves)
        step = math.ceil(short / c.price - 1e-9) if short > 0 else (round(short) if exact else 0)
        counts[name] = max(
            c.fewest, min(c.prunable if c.most is None else c.most, counts[name] + step)
        )
    return counts
