"""Figures about one layer each: the sensitivity of its weights, and its error at every count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lobs.pruning.preview import BudgetPreview
from lobs.pruning.result import PruningResult
from lobs.report.figures import COLOURS, Figure, axis, figure, mark, positive
from lobs.report.words import number, percent
from lobs.solvers.scores import Histogram
from lobs.solvers.solution import Solution

if TYPE_CHECKING:
    from lobs.report import Run

HEIGHT = 270


def sensitivity(histogram: Histogram | None) -> Figure | None:
    """Draw a histogram of a layer's sensitivities, on a logarithmic axis."""
    if histogram is None or not histogram.counts:
        return None
    total = sum(histogram.counts) + histogram.zeros
    ends = [10**edge for edge in histogram.edges]
    spans = zip(ends, ends[1:], histogram.counts, strict=False)
    steps = {
        "mode": "lines",
        "x": ends,
        "y": [*(round(100 * count / total, 3) for count in histogram.counts), 0.0],
        "hovertext": [
            f"{number(a, 2)} to {number(b, 2)}\n{count:,} weights" for a, b, count in spans
        ],
        "fill": "tozeroy",
        "line": {"color": COLOURS[0], "width": 1.5, "shape": "hv"},
    }
    x = axis("sensitivity", type="log", range=[histogram.edges[0], histogram.edges[-1]])
    return figure([steps], HEIGHT, x, axis("weights (%)", rangemode="tozero"))


def sensitivity_note(histogram: Histogram, share: float = 0.9) -> str:
    """Say below which sensitivity most weights lie, and how many weights have none."""
    total = sum(histogram.counts) + histogram.zeros
    reached = zip(
        histogram.edges, accumulate(histogram.counts, initial=histogram.zeros), strict=True
    )
    edge = next(edge for edge, count in reached if count >= share * total)
    zeros = (
        f" {histogram.zeros:,} ({percent(histogram.zeros / total)}) have none."
        if histogram.zeros
        else ""
    )
    return f"{100 * share:g}\u202f% of the weights lie below {number(10**edge, 2)}.{zeros}"


def error_curve(name: str, runs: Sequence[Run]) -> Figure | None:
    """Draw relative error against weights removed, and mark where each run stopped.

    The line comes from the solver, or else from the budget preview.
    """
    lines: list[dict[str, Any]] = []
    cuts: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        solution = (
            run.pruning.solutions.get(name) if isinstance(run.pruning, PruningResult) else None
        )
        layer = next((layer for layer in run.pruning.layers if layer.name == name), None)
        if solution is not None and solution.curve is not None and solution.energy > 0:
            lines.append(_line(index, solution, solution.curve))
        elif run.pruning.preview is not None and name in run.pruning.preview.totals:
            lines.append(_forecast(index, run.pruning.preview, name))
            solution = None  # the line forecasts the error that the layer's result holds
        if solution is not None:
            cuts.append(
                _cut(index, run.label, solution.removed, solution.prunable, solution.relative_error)
            )
        elif layer is not None:
            cuts.append(
                _cut(index, run.label, layer.total - layer.kept, layer.total, layer.relative_error)
            )
    if not lines:
        return None
    y = axis("relative error (%)", type="log", range=_range(lines, cuts))
    return figure(lines + cuts[::-1], HEIGHT, axis("weights removed (%)", range=[-2, 102]), y)


def thin(curve: Tensor, cut: int, points: int = 400) -> list[int]:
    """Return the counts at which to draw a curve, with both ends and the cut.

    They are evenly spaced along the line as it is drawn, with a logarithmic vertical axis. Even
    steps in the count would skip the steep ends, where few weights change the error by decades.

    Args:
        curve: E after every deletion.
        cut: the count at which pruning stopped.
        points: largest number of counts.
    """
    values = torch.nan_to_num(curve.detach().cpu().to(torch.float64))
    if len(values) <= points:
        return list(range(len(values)))
    # Ten decades of E are five of the relative error. Values below are rounding noise.
    climb = values.clamp_min(max(float(values.max()) * 1e-10, 1e-300)).log10().diff().abs()
    along = (climb / climb.sum().clamp_min(1e-300) + 1 / len(climb)).cumsum(0)
    marks = (
        torch.searchsorted(
            along, torch.linspace(0, float(along[-1]), points - 3, dtype=along.dtype)
        )
        + 1
    )
    return sorted({*marks.clamp_max(len(climb)).tolist(), 0, len(climb), cut})


def _line(index: int, solution: Solution, curve: Tensor) -> dict[str, Any]:
    counts = thin(curve, solution.removed)
    errors = [math.sqrt(max(error, 0.0) / solution.energy) for error in curve[counts].tolist()]
    # More digits than a screen shows would only make the file larger.
    return _drawn(index, counts, [float(f"{error:.5g}") for error in errors], solution.prunable)


def _forecast(index: int, preview: BudgetPreview, name: str) -> dict[str, Any]:
    return _drawn(
        index, preview.removed[name], preview.errors[name], preview.totals[name], dash="dot"
    )


def _drawn(
    index: int, counts: Sequence[int], errors: Sequence[float], total: int, dash: str = "solid"
) -> dict[str, Any]:
    removed = [round(_removed(count, total), 3) for count in counts]
    return {
        "mode": "lines",
        "x": removed,
        "y": [_percent(error) for error in errors],
        "hovertext": [
            f"{x:g} % removed\nrelative error {percent(error)}"
            for x, error in zip(removed, errors, strict=True)
        ],
        "line": {"color": COLOURS[index % len(COLOURS)], "width": 2, "dash": dash},
    }


def _cut(index: int, label: str, removed: int, total: int, error: float) -> dict[str, Any]:
    hover = f"{label}\n{removed:,} of {total:,} removed\nrelative error {percent(error)}"
    return mark(index, [_removed(removed, total)], [_percent(error)], [hover])


def _percent(error: float) -> float | None:
    known = positive(error)
    return None if known is None else 100 * known


def _removed(count: int, total: int) -> float:
    return 100 * count / max(total, 1)


def _range(lines: Sequence[dict[str, Any]], cuts: Sequence[dict[str, Any]]) -> list[float]:
    """Return the range from 0.01 %, or a tenth of the lowest cut if that is less, to the top."""
    dots = [y for trace in cuts for y in trace["y"] if y]
    values = dots + [y for trace in lines for y in trace["y"] if y] or [10.0, 100.0]
    low = max(min(values), min([1e-2, *(dot / 10 for dot in dots)]))
    return [math.log10(low) - 0.1, math.log10(max(values)) + 0.25]
