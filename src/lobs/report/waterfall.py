"""The error as a waterfall: what each layer adds to the deviation, and what it corrects.

For layers pruned on their own inputs, the steps are the terms of the bound and add up to it. With
asymmetric inputs the deviation after every layer was measured, relative to the layer's output. The
steps are then its rises and falls from layer to layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lobs.report.figures import NEUTRAL, Figure, axis, figure, height, positive, rows_of
from lobs.report.words import number, percent, short_names

if TYPE_CHECKING:
    from lobs.report import Run

RISES, FALLS = "#D55E00", "#009E73"


class Step(NamedTuple):
    """One bar: its name, its two ends, and whether it is a total rather than a step."""

    name: str
    start: float
    stop: float
    level: bool = False


def waterfall(run: Run, most: int = 14) -> Figure | None:
    """Draw where a run's error comes from, or return None with fewer than two layers."""
    steps, unit = ledger(run), run.pruning.certificate.output_norm
    if steps is None and run.pruning.settings.get("inputs") == "asymmetric":
        steps, unit = deviations(run), 1.0
        title = "deviation (% of the layer's output)"
    else:
        title = "change of the output (% of its norm)" if unit else "change of the output"
    if not steps or sum(not step.level for step in steps) < 2:
        return None
    return _drawn(_largest(steps, most), title, unit)


def ledger(run: Run) -> list[Step] | None:
    """Return the terms of the spectral bound, their sum, and the measured change."""
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
    """Return the rises and falls of the deviation from layer to layer, and the last deviation."""
    steps, now = [], 0.0
    for layer in run.pruning.layers:
        if positive(layer.relative_error):
            steps.append(Step(layer.name, now, layer.relative_error))
            now = layer.relative_error
    return [*steps, Step("at the last layer", 0.0, now, True)] if steps else None


def _largest(steps: list[Step], most: int) -> list[Step]:
    """Keep the largest steps, and join the small ones between them, so that the sum is the same."""
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


def _drawn(steps: list[Step], title: str, unit: float | None) -> Figure:
    """Draw steps in percent of `unit`, or as they are where it is not known."""
    scale = 100 / unit if unit else 1.0
    text = [_words(step, unit) for step in steps]
    bars = {
        "type": "bar",
        "base": [scale * min(step.start, step.stop) for step in steps],
        "x": [scale * abs(step.stop - step.start) for step in steps],
        "y": list(range(len(steps))),
        "hovertext": [f"{step.name}\n{word}" for step, word in zip(steps, text, strict=True)],
        "marker": {
            "color": [NEUTRAL if s.level else RISES if s.stop >= s.start else FALLS for s in steps]
        },
    }
    labels = short_names([step.name for step in steps])
    return figure([bars], height(len(steps), 1), axis(title, rangemode="tozero"), rows_of(labels))


def _words(step: Step, unit: float | None) -> str:
    def write(value: float) -> str:
        return percent(value / unit) if unit else number(value)

    if step.level:
        return write(step.stop)
    change = step.stop - step.start
    return f"{'+' if change >= 0 else '−'}{write(abs(change))}, then {write(step.stop)}"
