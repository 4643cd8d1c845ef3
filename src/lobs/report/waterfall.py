"""The error ledger as a waterfall: what each layer adds to the deviation, what it mends, and what is left at the end.

Where layers were pruned on their own inputs, the steps are the terms of the proved bound and end in
it. With asymmetric inputs every layer's whole deviation was measured, relative to its output; the
steps are then its rises and falls from layer to layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lobs.report.figures import NEUTRAL, Figure, axis, figure, height, positive, rows_of, shown
from lobs.report.words import number, short_names

if TYPE_CHECKING:
    from lobs.report import Run

RISES, FALLS = "#D55E00", "#009E73"


class Step(NamedTuple):
    """One bar: its name, where it begins and ends, and whether it is a step or a level."""

    name: str
    start: float
    stop: float
    level: bool = False


def waterfall(run: Run, most: int = 14) -> Figure | None:
    """A run's ledger; None where nothing can be added up."""
    steps = ledger(run)
    if steps is None and run.pruning.settings.get("inputs") == "asymmetric":
        steps = deviations(run)
        title = "deviation, relative to the layer's output"
    else:
        title = "change of the output"
    return None if not steps else _drawn(_largest(steps, most), title)


def ledger(run: Run) -> list[Step] | None:
    """The terms of the spectral bound, one on another, the bound itself, and what was measured."""
    certificate = run.pruning.certificate
    if not positive(certificate.bound) or run.pruning.settings.get("inputs") == "asymmetric":
        return None
    steps, reached = [], 0.0
    for name, term in certificate.contributions.items():
        steps.append(Step(name, reached, reached + term))
        reached += term
    ends = [Step("guaranteed bound", 0.0, certificate.bound or 0.0, True)]
    if certificate.measured is not None:
        ends.append(Step("measured", 0.0, certificate.measured, True))
    return [*steps, *ends] if all(positive(step.stop) for step in steps) else None


def deviations(run: Run) -> list[Step] | None:
    """How far each layer's output is off, as rises and falls, and where that ends."""
    steps, now = [], 0.0
    for layer in run.pruning.layers:
        if positive(layer.relative_error):
            steps.append(Step(layer.name, now, layer.relative_error))
            now = layer.relative_error
    return [*steps, Step("left at the last layer", 0.0, now, True)] if steps else None


def _largest(steps: list[Step], most: int) -> list[Step]:
    """The steps that matter; runs of small ones between them become one, so that the sum still adds up."""
    moves = sorted((abs(step.stop - step.start) for step in steps if not step.level), reverse=True)
    if len(moves) <= most:
        return steps
    least, shorter = moves[most - 1], list[Step]()
    held: list[Step] = []
    for step in [*steps]:
        if not step.level and abs(step.stop - step.start) < least:
            held.append(step)
            continue
        shorter += _joined(held)
        held = []
        shorter.append(step)
    return shorter


def _joined(held: list[Step]) -> list[Step]:
    if len(held) < 2:
        return held
    return [Step(f"{len(held)} layers between", held[0].start, held[-1].stop)]


def _drawn(steps: list[Step], title: str) -> Figure:
    labels = short_names([step.name for step in steps])
    bars = {
        "type": "bar",
        "orientation": "h",
        "base": [min(step.start, step.stop) for step in steps],
        "x": [abs(step.stop - step.start) for step in steps],
        "y": list(range(len(steps))),
        "hovertext": [shown(step.name) + "<br>" + _words(step) for step in steps],
        "text": [_words(step) for step in steps],
        "textposition": "none",
        "marker": {
            "color": [NEUTRAL if s.level else RISES if s.stop >= s.start else FALLS for s in steps]
        },
    }
    return figure([bars], height(len(steps), 1), axis(title, rangemode="tozero"), rows_of(labels))


def _words(step: Step) -> str:
    if step.level:
        return number(step.stop)
    change = step.stop - step.start
    return f"{'+' if change >= 0 else '−'}{number(abs(change))}, then {number(step.stop)}"
