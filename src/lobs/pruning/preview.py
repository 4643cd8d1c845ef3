"""Budget preview: what other budgets would take from each layer, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lobs.pruning.plan import Curve, RowLosses, allocations, reach

STOPS = 140
_LOWEST = 1e-3  # smallest kept fraction; below it little is left of any network


@dataclass(frozen=True, repr=False)
class BudgetPreview:
    """A table of budgets, from few weights removed to nearly all. Stop `at` is the budget that ran.

    `removed[name][i]` is the number of weights that layer `name` gives at stop i, exactly as a run
    with that budget would allocate them. `errors[name][i]` is its predicted relative error, by the
    greedy solver on the dense network's inputs. `change[i]` is the predicted root mean square
    change of the network's output, to first order and with independent units. `priced` says that
    the budget counts bytes or operations, not weights.
    """

    totals: dict[str, int]
    removed: dict[str, tuple[int, ...]]
    errors: dict[str, tuple[float, ...]]
    change: tuple[float, ...]
    at: int
    priced: bool = False

    def __repr__(self) -> str:
        return f"BudgetPreview({len(self.totals)} layers, {len(self.change)} stops, at={self.at})"

    def __post_init__(self) -> None:
        stops = len(self.change)
        tables = [*self.removed.values(), *self.errors.values()]
        if not 0 <= self.at < stops or any(len(row) != stops for row in tables):
            raise ValueError(f"a budget preview of {stops} stops does not fit its tables")
        if not self.totals.keys() == self.removed.keys() == self.errors.keys():
            raise ValueError("a budget preview's tables are of different layers")

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BudgetPreview:
        """Restore a preview from its JSON record."""
        return BudgetPreview(
            totals={name: int(n) for name, n in record["totals"].items()},
            removed={name: tuple(int(n) for n in row) for name, row in record["removed"].items()},
            errors={name: tuple(float(x) for x in row) for name, row in record["errors"].items()},
            change=tuple(float(x) for x in record["change"]),
            at=int(record["at"]),
            priced=bool(record.get("priced", False)),
        )

    def kept_fraction(self, stop: int) -> float:
        """Return the kept fraction of all weights at a stop."""
        gone = sum(row[stop] for row in self.removed.values())
        return 1 - gone / max(1, sum(self.totals.values()))


def preview_budgets(
    curves: Mapping[str, Curve],
    losses: Mapping[str, RowLosses],
    importance: Mapping[str, Tensor],
    done: Mapping[str, int],
    stops: int = STOPS,
) -> BudgetPreview:
    """Allocate budgets on a logarithmic scale of the kept fraction, beside the run's own counts.

    It takes one sort of all keys and one of each layer's.

    Args:
        curves: the layers' error curves.
        losses: the losses behind them, by layer and row.
        importance: output influence of each row, by layer.
        done: how many weights the run removed, by layer.
        stops: number of budgets.
    """
    plans = {tuple(plan.values()): plan for plan in allocations(curves, _budgets(curves, stops))}
    own = tuple(done[name] for name in curves)
    plans[own] = dict(zip(curves, own, strict=True))
    rising = sorted(plans, key=lambda counts: (sum(counts), counts))
    errors, weighted = {}, torch.zeros(len(rising), dtype=torch.float64)
    for index, name in enumerate(curves):
        plain, felt = _costs(losses[name], importance[name], [counts[index] for counts in rising])
        energy = losses[name].energy
        errors[name] = tuple(
            _short(math.sqrt(e / energy)) if energy else 0.0 for e in plain.tolist()
        )
        weighted += felt
    return BudgetPreview(
        totals={name: c.prunable for name, c in curves.items()},
        removed={
            name: tuple(counts[index] for counts in rising) for index, name in enumerate(curves)
        },
        errors=errors,
        change=tuple(_short(math.sqrt(x)) for x in weighted.tolist()),
        at=rising.index(own),
        priced=any(c.price != 1 for c in curves.values()),
    )


def _budgets(curves: Mapping[str, Curve], stops: int) -> list[float]:
    forced, most = reach(curves)
    whole = sum(c.prunable * c.price for c in curves.values())
    kept = torch.logspace(0, math.log10(_LOWEST), stops, dtype=torch.float64)
    gives = (whole * (1 - kept)).clamp(forced, most)
    if all(c.price == 1 for c in curves.values()):
        gives = gives.round()
    return [float(give) for give in gives]


def _costs(losses: RowLosses, importance: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return E at each count, plain and weighted by the rows' importance."""
    order = losses.keys(importance).flatten().sort(stable=True).indices
    weight = importance[:, losses.rows].unsqueeze(-1).expand(losses.losses.shape).flatten()[order]
    each = losses.losses.to(torch.float64).flatten()[order] * losses.multiplicity
    places = (torch.tensor(counts) / losses.multiplicity).round().long().clamp_max(len(order))
    start = torch.zeros(1, dtype=torch.float64)
    return tuple(
        torch.cat([start, x.cumsum(0)])[places].clamp_min(0.0)
        for x in (each, each * weight.to(each))
    )  # type: ignore[return-value]


def _short(value: float) -> float:
    """Round to five digits: more than a screen shows, and a fifth of the bytes."""
    return float(f"{value:.5g}")
