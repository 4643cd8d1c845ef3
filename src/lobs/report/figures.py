"""Figures as plain dictionaries: layers in rows, runs in colours. charts.js draws them.

A figure has traces and axes. A trace is a row of bars, a line or a set of marks. Fonts, grids and
ticks are chosen by charts.js, which knows whether the page is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lobs.report.words import percent, relative, short_names

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult
    from lobs.report import Run

Figure = dict[str, Any]

# The palette of Okabe and Ito, without black and yellow: each is invisible on one background.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
NEUTRAL = "#8A939C"
# Marks as SVG paths in a square of 12: circle, diamond, square and two triangles. There are fewer
# marks than colours, so that a pair of both repeats late.
MARKS = (
    "M6 1a5 5 0 1 0 .01 0z",
    "M6 0l6 6-6 6-6-6z",
    "M1 1h10v10H1z",
    "M6 1l6 10H0z",
    "M6 11l6-10H0z",
)
CROSS = "M2 0L6 4 10 0 12 2 8 6 12 10 10 12 6 8 2 12 0 10 4 6 0 2z"
_SAME_BOUND = 1.05  # a bound this close to the measured change adds nothing to it


def kept(runs: Sequence[Run]) -> Figure:
    """Draw the percentage of weights kept as bars; one bar per layer if all runs keep the same."""
    names = layer_names(runs)
    same = len(
        {tuple((layer.name, layer.kept) for layer in run.pruning.layers) for run in runs}
    ) < min(len(runs), 2)
    words = "{0.kept:,} of {0.total:,}".format
    tables = [
        _by_layer(run, names, lambda x: 100 * x.kept_fraction, words)
        for run in runs[: 1 if same else None]
    ]
    data = [bars(index, *table) for index, table in enumerate(tables)]
    if same:
        data[0]["marker"]["color"] = NEUTRAL
    x = axis(
        "weights kept (%), the same in all runs" if same else "weights kept (%)", range=[0, 100]
    )
    return figure(data, height(len(names), len(data)), x, rows_of(short_names(names)))


def relative_errors(runs: Sequence[Run]) -> Figure:
    """Draw the relative error per layer in percent, as marks on a logarithmic axis."""
    names = layer_names(runs)
    tables = [
        _by_layer(run, names, lambda x: 100 * x.relative_error, lambda x: percent(x.relative_error))
        for run in runs
    ]
    data = [
        mark(i, [positive(x) for x in values], list(range(len(names))), hover)
        for i, (values, hover) in enumerate(tables)
    ]
    low, high = _exponents([x for trace in data for x in trace["x"]])
    x = axis(
        "relative error (%)", type="log", range=[math.floor(low - 0.05), math.ceil(high + 0.05)]
    )
    # The last trace is drawn on top: the main run. The figure stands beside `kept`.
    return figure(
        data[::-1],
        kept(runs)["layout"]["height"],
        x,
        rows_of(short_names(names)) | {"showgrid": True},
    )


def bounds(runs: Sequence[Run]) -> Figure | None:
    """Draw measured changes of the output beside their bounds, as bars on a logarithmic axis.

    Return None if there is no bound, or if every bound equals the measured change. With asymmetric
    inputs it does, because layer errors are then measured in the pruned network.
    """
    certificates = [run.pruning.certificate for run in runs]
    if not any(_says_something(c.bound, c.measured) for c in certificates):
        return None
    tried = any(c.held_out is not None for c in certificates)
    rows = [
        *(["held-out inputs"] if tried else []),
        "measured",
        "spectral bound",
        "Frobenius bound",
    ]
    shares = all(c.output_norm for c in certificates)
    unit = 100 if shares else 1
    data = []
    for index, run in enumerate(runs):
        c = run.pruning.certificate
        known = (c.held_out, c.measured, c.bound, c.frobenius_bound)[-len(rows) :]
        values = [positive(c.relative(x) if shares else x) for x in known]
        text = [relative(x, c) if x is not None and positive(x) else "" for x in known]
        hover = [f"{run.label}: {word}" for word in text]
        data.append(
            bars(index, [None if x is None else unit * x for x in values], hover)
            | {"text": text, "textposition": "outside"}
        )
    low, high = _exponents([x for trace in data for x in trace["x"]])
    low = math.floor(low - 0.3)  # so that the shortest bar has a length
    title = "change of the output (% of its norm)" if shares else "change of the output"
    x = axis(title, type="log", range=[low, max(high + 0.05 * (high - low), low + 1)])
    return figure(data, height(len(rows), len(runs), 20), x, rows_of(rows))


def _says_something(bound: float | None, measured: float | None) -> bool:
    return bound is not None and not (measured and bound <= _SAME_BOUND * measured)


def layer_names(runs: Sequence[Run]) -> list[str]:
    """Return every layer of every run once, in order."""
    return list(dict.fromkeys(layer.name for run in runs for layer in run.pruning.layers))


def figure(data: list[dict[str, Any]], height: int, x: dict[str, Any], y: dict[str, Any]) -> Figure:
    """Put traces and axes together.

    Args:
        data: the traces.
        height: in pixels.
        x: the horizontal axis.
        y: the vertical axis.
    """
    return {"data": data, "layout": {"height": height, "bargap": 0.3, "xaxis": x, "yaxis": y}}


def axis(title: str, **more: object) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": title}, **more}


def mark(index: int, x: list[float | None], y: list[Any], hover: list[str]) -> dict[str, Any]:
    """Return points in the shape and colour of a run.

    Args:
        index: number of the run.
        x: horizontal places; None leaves a point out.
        y: vertical places.
        hover: the text of each point.
    """
    style = {"color": COLOURS[index % len(COLOURS)], "path": MARKS[index % len(MARKS)], "size": 11}
    return {"mode": "markers", "x": x, "y": y, "hovertext": hover, "marker": style}


def bars(index: int, values: Sequence[float | None], hover: Sequence[str]) -> dict[str, Any]:
    """Return horizontal bars in the colour of a run, one per row.

    Args:
        index: number of the run.
        values: lengths of the bars; None leaves one out.
        hover: the text of each bar.
    """
    return {
        "type": "bar",
        "x": list(values),
        "y": list(range(len(values))),
        "hovertext": list(hover),
        "marker": {"color": COLOURS[index % len(COLOURS)]},
    }


def positive(value: float | None) -> float | None:
    """Return the value if a logarithmic axis can show it, else None."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _by_layer(
    run: Run,
    names: Sequence[str],
    value: Callable[[LayerResult], float],
    words: Callable[[LayerResult], str],
) -> tuple[list[float | None], list[str]]:
    """Return a number and a text per name; None where the layer or a finite number is missing."""
    layers = {layer.name: layer for layer in run.pruning.layers}
    values = [value(layers[name]) if name in layers else math.nan for name in names]
    hover = [
        f"{name}\n{run.label}: {words(layers[name])}" if name in layers else "" for name in names
    ]
    return [x if math.isfinite(x) else None for x in values], hover


def rows_of(labels: Sequence[str]) -> dict[str, Any]:
    """Return an axis of rows from the top. Places are numbers, so equal labels stay two rows."""
    ticks = {"tickvals": list(range(len(labels))), "ticktext": list(labels)}
    return {**ticks, "range": [len(labels) - 0.5, -0.5], "showgrid": False}


def height(rows: int, runs: int, bar: int = 14) -> int:
    """Return the pixels that rows of bars and their axis take.

    Args:
        rows: number of rows.
        runs: bars per row.
        bar: pixels per bar.
    """
    return 52 + max(rows * (bar * runs + 14), 60)


def _exponents(values: Sequence[float | None]) -> tuple[float, float]:
    logs = [math.log10(x) for x in values if x] or [-1.0, 0.0]
    return min(logs), max(logs)
