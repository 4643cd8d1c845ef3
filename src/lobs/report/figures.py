"""Figures as plain plotly dictionaries: layers in rows, runs in colours.

Only what the data decides is said here; fonts, grids and ticks are page.js's, which knows whether
the page is light or dark. Plotly reads a little HTML in its texts, so what comes from a user is
escaped on its way in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lobs.report.words import number, short_names

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult
    from lobs.report import Run

Figure = dict[str, Any]

# Okabe and Ito's colours without black and yellow, which vanish on one of the two backgrounds.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
NEUTRAL = "#8A939C"
# Plotly's name of a mark, and the same shape as a path of 12 by 12 for the legend; five, so that
# pairs repeat late.
MARKS = (
    ("circle", "M6 1a5 5 0 1 0 .01 0z"),
    ("diamond", "M6 0l6 6-6 6-6-6z"),
    ("square", "M1 1h10v10H1z"),
    ("triangle-up", "M6 1l6 10H0z"),
    ("triangle-down", "M6 11l6-10H0z"),
)


def kept(runs: Sequence[Run]) -> Figure:
    """Bars: percent of weights kept. Where all runs keep the same, one bar says what several would repeat."""
    names = layer_names(runs)
    same = len(
        {tuple((layer.name, layer.kept) for layer in run.pruning.layers) for run in runs}
    ) < min(len(runs), 2)
    words = "{0.kept:,} of {0.total:,}".format
    tables = [
        _by_layer(run, names, lambda x: 100 * x.kept_fraction, words)
        for run in runs[: 1 if same else None]
    ]
    data = [_bars(index, *table) for index, table in enumerate(tables)]
    if same:
        data[0]["marker"]["color"] = NEUTRAL
    x = axis(
        "weights kept (%), the same in all runs" if same else "weights kept (%)", range=[0, 100]
    )
    return figure(data, height(len(names), len(data)), x, rows_of(short_names(names)))


def relative_errors(runs: Sequence[Run]) -> Figure:
    """Marks on a logarithmic axis: relative error per layer."""
    names = layer_names(runs)
    tables = [
        _by_layer(run, names, lambda x: x.relative_error, lambda x: number(x.relative_error))
        for run in runs
    ]
    data = [
        mark(i, [positive(x) for x in values], list(range(len(names))), hover)
        for i, (values, hover) in enumerate(tables)
    ]
    low, high = _exponents([x for trace in data for x in trace["x"]])
    x = axis("relative error", type="log", range=[math.floor(low - 0.05), math.ceil(high + 0.05)])
    # The last trace lies on top: the main run. The figure stands beside `kept`.
    return figure(
        data[::-1],
        kept(runs)["layout"]["height"],
        x,
        rows_of(short_names(names)) | {"showgrid": True},
    )


def bounds(runs: Sequence[Run]) -> Figure | None:
    """Bars on a logarithmic axis: what was measured, what is guaranteed; None where nothing is."""
    tried = any(run.pruning.certificate.held_out is not None for run in runs)
    rows = [
        *(["held-out inputs"] if tried else []),
        "measured",
        "spectral bound",
        "Frobenius bound",
    ]
    data = []
    for index, run in enumerate(runs):
        certificate = run.pruning.certificate
        known = (
            certificate.held_out,
            certificate.measured,
            certificate.bound,
            certificate.frobenius_bound,
        )[-len(rows) :]
        values = [positive(x) for x in known]
        text = [number(x) if x else "" for x in values]
        hover = [shown(f"{run.label}: {x}") for x in text]
        data.append(
            _bars(index, values, hover)
            | {"text": text, "textposition": "outside", "cliponaxis": False}
        )
    low, high = _exponents([x for trace in data for x in trace["x"]])
    low = math.floor(low - 0.3)  # a bar of no length would be no bar
    x = axis(
        "change of the output", type="log", range=[low, max(high + 0.25 * (high - low), low + 1.2)]
    )
    guaranteed = any(run.pruning.certificate.bound is not None for run in runs)
    return figure(data, height(len(rows), len(runs), 20), x, rows_of(rows)) if guaranteed else None


def layer_names(runs: Sequence[Run]) -> list[str]:
    """Every layer of every run once, in order."""
    return list(dict.fromkeys(layer.name for run in runs for layer in run.pruning.layers))


def figure(data: list[dict[str, Any]], height: int, x: dict[str, Any], y: dict[str, Any]) -> Figure:
    """Traces and axes."""
    return {"data": data, "layout": {"height": height, "bargap": 0.3, "xaxis": x, "yaxis": y}}


def axis(title: str, **more: object) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def mark(index: int, x: list[float | None], y: list[Any], hover: list[str]) -> dict[str, Any]:
    """Points in the shape and colour of a run."""
    style = {
        "color": COLOURS[index % len(COLOURS)],
        "symbol": MARKS[index % len(MARKS)][0],
        "size": 11,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "hovertext": hover,
        "marker": style,
    }


def positive(value: float | None) -> float | None:
    """The value if a logarithmic axis can take it."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def shown(text: str) -> str:
    """Text that plotly shows as it is; it knows no entities for quotes."""
    return escape(text, quote=False)


def _by_layer(
    run: Run,
    names: Sequence[str],
    value: Callable[[LayerResult], float],
    words: Callable[[LayerResult], str],
) -> tuple[list[float | None], list[str]]:
    """Numbers to draw and words to hover, one per name; nothing where the run has no such layer or the number is not finite."""
    layers = {layer.name: layer for layer in run.pruning.layers}
    values = [value(layers[name]) if name in layers else math.nan for name in names]
    hover = [
        shown(name) + "<br>" + shown(f"{run.label}: {words(layers[name])}")
        if name in layers
        else ""
        for name in names
    ]
    return [x if math.isfinite(x) else None for x in values], hover


def _bars(index: int, values: Sequence[float | None], hover: Sequence[str]) -> dict[str, Any]:
    style = {"color": COLOURS[index % len(COLOURS)]}
    places = list(range(len(values)))
    return {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": places,
        "hovertext": list(hover),
        "marker": style,
    }


def rows_of(labels: Sequence[str]) -> dict[str, Any]:
    """Rows from the top. Their places are numbers, so that two names cut to the same text stay two rows."""
    ticks = {"tickvals": list(range(len(labels))), "ticktext": [shown(label) for label in labels]}
    return {**ticks, "range": [len(labels) - 0.5, -0.5], "showgrid": False, "ticklabelstandoff": 6}


def height(rows: int, runs: int, bar: int = 14) -> int:
    """Pixels for so many rows of bars, with room for their axis."""
    return 70 + max(rows * (bar * runs + 14), 90)


def _exponents(values: Sequence[float | None]) -> tuple[float, float]:
    logs = [math.log10(x) for x in values if x] or [-1.0, 0.0]
    return min(logs), max(logs)
