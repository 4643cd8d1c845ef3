"""Draw plain line pictures, all in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {
    "L-OBS": "#1f77b4",
    "greedy": "#d62728",
    "LWC": "#2ca02c",
    "ApoZW": "#9467bd",
    "Random": "#8c8c8c",
    "Net-Trim": "#ff7f0e",
    "auto, dense inputs": "#17becf",
    "default": "#e377c2",
    "auto, one budget": "#bcbd22",
}


def axes(title: str, x: str, y: str) -> Any:
    """Return a figure with one set of labelled axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, one = pyplot.subplots(figsize=(6.4, 4.0), dpi=120)
    one.set(title=title, xlabel=x, ylabel=y)
    one.grid(alpha=0.3)
    return figure, one


def lines(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    **options: Any,
) -> None:
    """Draw named curves and save the picture.

    Options go to the axes. `marks` are vertical and `levels` horizontal lines, by label.
    """
    marks: Mapping[str, float] = options.pop("marks", {})
    levels: Mapping[str, float] = options.pop("levels", {})
    figure, one = axes(title, x, y)
    for name, (across, up) in curves.items():
        one.plot(
            across,
            up,
            label=name,
            color=_COLOURS.get(name),
            marker="o" if len(across) < 25 else None,
            markersize=3,
            linewidth=1.4,
        )
    for label, at in marks.items():
        one.axvline(at, linestyle=":", color="black", linewidth=1, label=label)
    for (label, at), style in zip(levels.items(), ("--", ":", "-."), strict=False):
        one.axhline(at, linestyle=style, color="black", linewidth=1, label=label)
    one.set(**options)
    if options.get("yscale") == "log":
        _plain_numbers(one)
    one.legend(fontsize=8)
    save(figure, path)


def _plain_numbers(one: Any) -> None:
    """Label a log axis 1, 2, 5, 10 instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    one.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    one.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    one.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path) -> None:
    """Write a figure and close it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
