"""One budget for the whole network: how many weights does each layer give?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import TargetError
from lobs.solvers import GreedyOBS, scores
from lobs.solvers.problem import Problem

# Exact greedy on all rows up to this many multiply-adds; past it on as many rows as fit, at least a
# few.
_AFFORDABLE = 6e10
_FEWEST_ROWS = 4
# Rows whose size and importance are looked at all the same.
_SIZED_ROWS = 64


@dataclass(frozen=True)
class RowLosses:
    """What deletions cost in some rows of a layer, step by step: (groups, some rows, steps), run or put together."""

    losses: Tensor
    rows: Tensor
    of: int  # rows there are
    energy: float  # mean squared output of the dense layer

    @property
    def multiplicity(self) -> float:
        """How many rows each of these stands for."""
        return self.of / len(self.rows)

    def keys(self, importance: Tensor) -> Tensor:
        """What decides who goes first: never falling along a row."""
        return self.losses.cummax(dim=-1).values * importance.to(self.losses)[
            :, self.rows
        ].unsqueeze(-1)

    def packed(self) -> dict[str, Tensor]:
        """All of it as tensors."""
        energy = torch.tensor(self.energy, dtype=torch.float64)
        return {
            "losses": self.losses,
            "rows": self.rows,
            "of": torch.tensor(self.of),
            "energy": energy,
        }

    @classmethod
    def unpacked(cls, parts: Mapping[str, Tensor]) -> RowLosses:
        """The inverse of `packed`."""
        return cls(parts["losses"], parts["rows"], int(parts["of"]), float(parts["energy"]))

    def curve(
        self,
        prunable: int,
        importance: Tensor,
        fewest: int = 0,
        most: int | None = None,
        price: float = 1.0,
    ) -> Curve:
        """The layer's curve when rows matter as `importance` (groups, rows) says."""
        return Curve(
            self.keys(importance).flatten(), self.multiplicity, prunable, fewest, most, price
        )


@dataclass(frozen=True)
class Curve:
    """What a layer's weights cost, one after another.

    `keys`, in any order, are marginal errors, weighted by how much each row matters; each stands
    for `multiplicity` weights where only some rows were run. `price` is what one weight is worth to
    the budget; between `fewest` and `most` may go.
    """

    keys: Tensor
    multiplicity: float
    prunable: int
    fewest: int = 0
    most: int | None = None
    price: float = 1.0


def row_losses(problem: Problem) -> RowLosses:
    """Run the exact greedy on a layer, or on a fair sample of its rows where all would cost too much.

    Rows are independent, so some of them, evenly spread, stand for all: wide layers, where the
    greedy costs rows·d³/3, are run on as many rows as are affordable. What rows have in common is
    the shape of their losses; how large these are, and how much they matter, differs by orders of
    magnitude. So other rows are put together from those: the same shape, at their own size.
    """
    groups, rows, d = len(problem.groups), problem.weight.shape[-2], problem.weight.shape[-1]
    affordable = int(_AFFORDABLE / (groups * d**3 / 3))
    count = max(min(rows, _FEWEST_ROWS), min(rows, affordable))
    if count == rows:
        return RowLosses(
            GreedyOBS().path(problem).losses.cpu(), torch.arange(rows), rows, problem.energy
        )
    picked = torch.linspace(0, rows - 1, count).round().long()
    shapes = GreedyOBS().path(problem.some_rows(picked.to(problem.weight.device))).losses.cpu()
    sized = torch.linspace(0, rows - 1, min(rows, max(count, _SIZED_ROWS))).round().long()
    size = _sizes(problem).to(shapes)
    losses = [_at_their_size(*group, picked, sized) for group in zip(shapes, size, strict=True)]
    return RowLosses(torch.stack(losses), sized, rows, problem.energy)


def _at_their_size(shapes: Tensor, size: Tensor, picked: Tensor, sized: Tensor) -> Tensor:
    """Losses of the rows `sized` from those of the rows `picked`, each from the nearest that has any."""
    alive = size[picked] > 0
    if not bool(alive.any()):
        return shapes.new_zeros(len(sized), shapes.shape[-1])
    near, losses = picked[alive], shapes[alive]
    like = (sized.unsqueeze(1) - near.unsqueeze(0)).abs().argmin(dim=1)
    return losses[like] * (size[sized] / size[near[like]]).unsqueeze(-1)


def _sizes(problem: Problem) -> Tensor:
    """How large a row's losses are: what its first deletions would cost, added up, (groups, rows).

    Where the inverse is not at hand, what they would cost uncompensated.
    """
    found = []
    for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True):
        plain = metric.known_inverse is None
        each = (
            metric.scaled(w).square() if plain else scores.obs(w, metric)
            for w in torch.split(weight, 1024)
        )
        found.append(
            torch.cat(
                [some[:, : weight.shape[-1] - problem.protected].sum(dim=-1) for some in each]
            )
        )
    return torch.stack(found).cpu()


def allocate(curves: Mapping[str, Curve], give: float) -> dict[str, int]:
    """Share removals worth `give` among layers so that the summed, weighted error grows least at every step.

    Keys rise along each row, so one sort across all layers by error per unit of price is the order
    in which a network-wide greedy would take the next deletion; a layer's share is how many of its
    own fall before the cut. Where all prices are 1 the counts add up to `give` exactly; otherwise
    to at least that. One sort of all keys.
    """
    return allocations(curves, [give])[0]


def reach(curves: Mapping[str, Curve]) -> tuple[float, float]:
    """The least and the most that limits per layer allow to go."""
    most = sum((c.prunable if c.most is None else c.most) * c.price for c in curves.values())
    return sum(c.fewest * c.price for c in curves.values()), most


def allocations(curves: Mapping[str, Curve], gives: Sequence[float]) -> list[dict[str, int]]:
    """`allocate` for several budgets, rising, from the same sort."""
    forced, most = reach(curves)
    for give in gives:
        if give > most + 1e-6 or (
            forced > max(give, 0) + 1e-6 and all(c.price == 1 for c in curves.values())
        ):
            limited = any(
                c.fewest or (c.most or 0) < c.prunable
                for c in curves.values()
                if c.most is not None
            )
            what = (
                "weights"
                if all(c.price == 1 for c in curves.values())
                else "worth (bytes or operations)"
            )
            remedy = (
                "Loosen keep_at_least or keep_at_most."
                if limited
                else "The budget is smaller than what cannot be pruned."
            )
            raise TargetError(
                f"between {forced:,.0f} and {most:,.0f} {what} can go, but {give:,.0f} must. "
                f"{remedy}"
            )
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
        shares.append(_settled(curves, _counts(curves, taken.tolist()), give))
    return shares


def _counts(curves: Mapping[str, Curve], taken: Sequence[int]) -> dict[str, int]:
    return {
        name: max(
            c.fewest, min(c.prunable if c.most is None else c.most, round(n * c.multiplicity))
        )
        for (name, c), n in zip(curves.items(), taken, strict=True)
    }


def _limited(curve: Curve) -> Tensor:
    """A layer's keys per unit of price, the forced ones first and the forbidden ones last."""
    keys = curve.keys.to(torch.float64).sort().values / curve.price
    place = torch.arange(1, len(keys) + 1) * curve.multiplicity
    keys = torch.where(place <= curve.fewest, -1.0, keys)
    return keys if curve.most is None else torch.where(place > curve.most, torch.inf, keys)


def _settled(curves: Mapping[str, Curve], counts: dict[str, int], give: float) -> dict[str, int]:
    """Make up for what sampling and rounding left over, in the largest layers first."""
    exact = all(c.price == 1 for c in curves.values())
    for name, c in sorted(curves.items(), key=lambda item: -item[1].prunable):
        short = give - sum(counts[n] * curves[n].price for n in curves)
        step = math.ceil(short / c.price - 1e-9) if short > 0 else (round(short) if exact else 0)
        counts[name] = max(
            c.fewest, min(c.prunable if c.most is None else c.most, counts[name] + step)
        )
    return counts
