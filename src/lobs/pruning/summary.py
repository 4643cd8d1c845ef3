"""Describe a result for people: as plain text, and as a small table for notebooks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lobs.errors import printable

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult, PruningRecord

_MANY = 40  # layers, above which layers of one kind share a line
_COLUMNS = ("layer", "shape", "kept", "rel. error", "seconds")


def gain(kept: int, total: int) -> str:
    """Return the gain as a sentence.

    >>> gain(18_634, 266_200)
    '14× fewer weights: 18,634 of 266,200 kept (7.00 %).'
    >>> gain(5, 5)
    'No weight was removed: 5 of 5 kept (100.00 %).'
    """
    if kept == total:
        lead = "No weight was removed"
    elif kept == 0:
        lead = "All weights were removed"
    else:
        ratio = total / kept
        lead = f"{ratio:,.0f}× fewer weights" if ratio >= 10 else f"{ratio:.1f}× fewer weights"
    share = kept / total if total else 1.0
    return f"{lead}: {kept:,} of {total:,} kept ({100 * share:.2f} %)."


def plain_text(result: PruningRecord) -> str:
    """Return the gain, a table of layers, and a line for everything else that is known."""
    lines = [gain(result.kept, result.total), *_headline(result), *table(result.layers)]
    return "\n".join([*lines, *_notes(result)])


def _headline(result: PruningRecord) -> list[str]:
    """Return one sentence on how the outputs changed: the guarantee, or the measured change.

    There is none where the output's size is not known, because a bare norm says nothing.
    """
    found = result.certificate
    if found.guarantee is not None:
        return [f"{found.guarantee}."]
    return [] if found.relative(found.measured) is None else [_change(result)]


def table(layers: Sequence[LayerResult]) -> list[str]:
    """Return a table of layers, line by line."""
    return _aligned([_COLUMNS, *map(_cells, layers)])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def short_table(layers: Sequence[LayerResult]) -> list[str]:
    """Return the table of layers; with many, one line for layers that differ by a number only."""
    if len(layers) <= _MANY:
        return table(layers)
    kinds: dict[tuple[str, str], list[LayerResult]] = {}
    for layer in layers:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name)
        kinds.setdefault((name, "×".join(map(str, layer.shape))), []).append(layer)
    rows = [
        (
            f"{printable(name)} ({len(some):,} layers)" if len(some) > 1 else printable(name),
            shape,
            f"{kept:,} ({100 * kept / max(1, sum(x.total for x in some)):.1f} %)",
            _span([x.relative_error for x in some]),
            f"{sum(x.seconds for x in some):.2f}",
        )
        for (name, shape), some in kinds.items()
        for kept in [sum(x.kept for x in some)]
    ]
    return _aligned([_COLUMNS, *rows])


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4f}", f"{max(values):.4f}"
    return low if low == high else f"{low} to {high}"


def html_table(result: PruningRecord) -> str:
    """Return the gain and a table of layers as HTML without scripts or styles."""
    sentence = "".join(_headline(result) or [_change(result)])
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(layer))}</tr>"
        for layer in result.layers
    )
    return (
        f"<p><b>{escape(gain(result.kept, result.total))}</b> {escape(sentence)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cells(layer: LayerResult) -> tuple[str, ...]:
    return (
        printable(layer.name),
        "×".join(map(str, layer.shape)),
        f"{layer.kept:,} ({100 * layer.kept_fraction:.1f} %)",
        f"{layer.relative_error:.4f}",
        f"{layer.seconds:.2f}",
    )


def _change(result: PruningRecord) -> str:
    """Describe how far the network's output moved, and how far it can have moved."""
    found = result.certificate

    def shown(change: float) -> str:
        relative = found.relative(change)
        return f"{change:.4g}" if relative is None else f"{100 * relative:.3g} %"

    measured, bound = (None if x is None else shown(x) for x in (found.measured, found.bound))
    parts = [] if measured is None else [f"{measured} measured"]
    if found.held_out is not None:
        parts.append(f"{shown(found.held_out)} on held-out inputs")
    if bound not in (None, measured):  # a bound that equals the measurement adds nothing
        parts.append(f"at most {bound} proven")
    samples = result.settings.get("measured samples", result.settings.get("samples"))
    unit = "root mean square" if found.output_norm is None else "of the output's norm"
    unit += f", {samples:,} calibration samples" if samples else ""
    line = f"Output change: {', '.join(parts) or 'not measured'} ({unit})."
    if found.certified:
        line += f" {stay(found.certified)} on calibration samples."
    if found.certified_held_out:
        line += f" {stay(found.certified_held_out)} on held-out inputs."
    if found.bound is not None or found.guarantee is not None:
        return line
    return f"{line} No bound: {found.reason}."


def stay(certified: float) -> str:
    """Return the share of certified answers in words, rounded down.

    >>> stay(0.98765)
    '98.7 % of the answers provably stay'
    """
    return f"{math.floor(1000 * certified) / 10:g} % of the answers provably stay"


def experts_left(experts: Mapping[str, Any]) -> str:
    """Return how many experts each mixture had and has.

    >>> experts_left({"before": 4, "removed": {"0.experts": [1], "1.experts": [3]}})
    'Experts: 4 → 3 in each of 2 mixtures.'
    """
    before, removed = experts["before"], experts["removed"]
    left = before - len(next(iter(removed.values())))
    return f"Experts: {before:,} → {left:,} in each of {len(removed):,} mixtures."


def _speed(time: Mapping[str, Any]) -> str:
    """Describe the time of one batch: dense, promised and measured."""
    dense, goal, predicted, measured = (
        f"{1e3 * time[f'{name} seconds']:.3g} ms"
        for name in ("dense", "goal", "predicted", "measured")
    )
    return (
        f"Time of a batch of {time['batch']} on {time['threads']} threads, accelerated: dense "
        f"{dense}, asked {goal}, predicted {predicted} ({time['predicted speedup']:.2f}×), "
        f"measured {measured} ({time['measured speedup']:.2f}×)."
    )


# Why a trial can fail although its estimated drop is within the budget.
LIMIT_COUNTS = (
    "A trial passes only if the upper confidence limit of its drop is within the budget: the "
    "estimate alone does not count."
)


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    """Describe the trials of a drop search, the largest network first."""
    tried = sorted(trials, key=lambda trial: -int(trial["kept"]))
    if any(t.get("at_most") is None for t in tried):  # the user's own score
        scores = (f"{t['kept']:,} kept, score {t['score']:.4g} ({-t['drop']:+.4g})" for t in tried)
        return f"Trials: {'; '.join(scores)}."
    drops = (
        f"{t['kept']:,} kept, estimated drop {t['drop']:.4g}, at most {t['at_most']:.4g}"
        for t in tried
    )
    return f"Trials: {'; '.join(drops)}. {LIMIT_COUNTS}"


def _notes(result: PruningRecord) -> list[str]:
    settings = result.settings
    change = _change(result)
    lines = [] if change in _headline(result) else [change]
    if result.coverage is not None:
        lines.insert(0, f"Prunable: {result.coverage}")
    damped = [f"{printable(x.name)} ({x.damping:.1e})" for x in result.layers if x.damping]
    if damped:
        lines.append(f"Damping λ: {', '.join(damped)}.")
    if result.batch_norm is not None:
        lines.append(f"Batch norm: {result.batch_norm}.")
    if "experts" in settings:
        lines.append(experts_left(settings["experts"]))
    if "refit" in settings:
        lines.append(f"Refit: {settings['refit']}.")
    rare = settings.get("rarely used", {})
    if rare:
        seen = ", ".join(f"{name} ({samples:,})" for name, samples in rare.items())
        lines.append(
            f"Rarely used experts, with the number of their tokens: {seen}. Calibrate on more data."
        )
    if "header" in settings:
        lines.append(
            "The budget counts tensors alone: it leaves no room for a compact file's header of up "
            f"to {settings['header']:,} bytes."
        )
    lost = settings.get("underflow", {})
    if lost:
        seen = ", ".join(f"{printable(name)} ({count:,})" for name, count in lost.items())
        lines.append(f"Kept weights that half precision rounds to zero: {seen}.")
    if "time" in settings:
        lines.append(_speed(settings["time"]))
    if "trials" in settings:
        lines.append(_trials(settings["trials"]))
    if result.phases:
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items())
        peak = result.peak_bytes
        memory = "" if peak is None else f"; at most {peak / 1e6:,.0f} MB of memory"
        lines.append(f"Time: {result.seconds:.1f} seconds ({spent}){memory}.")
    empty = [f"'{printable(x.name)}'" for x in result.layers if x.total and not x.kept]
    if empty:
        lines.append(
            f"Nothing is left of {', '.join(empty)}: keep more of small layers with keep_at_least."
        )
    return lines
