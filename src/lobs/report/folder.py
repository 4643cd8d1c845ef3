"""A page about two folders: measures, losses by sample, and what both networks write.

It shows what `lobs.hub.compare` returns. The layers come from the pruned folder's record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from lobs.report.page import templates
from lobs.report.words import percent

_NAMES = {"perplexity": "Perplexity", "accuracy": "Accuracy", "tokens": "Tokens"}
_WIDTH, _HEIGHT, _LEFT, _EDGE = 720, 260, 56, 12  # of the chart, and its margins
_MOST = 60  # samples that are drawn
_TICKS = 4
_RING, _STROKE = 4.0, 1.2  # largest radius of the ring that marks a dense loss, and its line


def render(found: Mapping[str, Any], command: str, layers: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the whole page as text.

    Args:
        found: what `lobs.hub.compare` returned.
        command: the command that gives these numbers again.
        layers: rows of the pruned folder's record: name, kept, total, relative_error.
    """
    page = templates().get_template("folder.html.j2")
    return page.render(
        title=f"{Path(found['small']).name}, pruned from {Path(found['dense']).name}",
        facts=_facts(found),
        rows=_rows(found),
        measured_on=_measured_on(found),
        losses=_losses(found.get("losses", ())),
        texts=[_text(row) for row in found.get("generations", ())],
        layers=layers,
        command=command,
    )


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headline: a number in bold and what it is."""
    small, dense = (found["metrics"][side] for side in ("small", "dense"))
    facts = []
    if "perplexity" in small:
        change = f"Perplexity {dense['perplexity']:.4g} → {small['perplexity']:.4g}"
        facts.append((f"{change}.", ""))
    if "accuracy" in small:
        facts.append((f"Accuracy {percent(dense['accuracy'])} → {percent(small['accuracy'])}.", ""))
    if "agreement" in found:
        rest = "of the likeliest predictions are the same."
        facts.append((percent(found["agreement"]), rest))
        facts.append((f"{found['kl']:.3g} nats", "of KL divergence for each prediction."))
    if "cosine" in found:
        facts.append((f"{found['cosine']:.4f}", "is the mean cosine of the outputs."))
    return facts


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    small, dense = (found["metrics"][side] for side in ("small", "dense"))
    rows = [(_NAMES.get(key, key), _number(key, dense[key]), _number(key, small[key]))
            for key in dense if key in small]  # fmt: skip
    for key, name, whole in (
        ("agreement", "Agreement with dense", "100 %"),
        ("kl", "KL(dense ‖ pruned), nats", "0"),
        ("cosine", "Cosine with dense", "1"),
    ):
        if key in found:
            rows.append((name, whole, _number(key, found[key])))
    for task, both in found.get("tasks", {}).items():
        rows.append((task, _score(both["dense"]), _score(both["small"])))
    return rows


def _score(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _number(key: str, value: float) -> str:
    if key in ("accuracy", "agreement"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _measured_on(found: Mapping[str, Any]) -> str:
    parts = [f"Measured on {found.get('samples', 0):,} samples of {found.get('data', 'the data')}"]
    if "length" in found:
        parts.append(f"length {found['length']}")
    if "predictions" in found:
        parts.append(f"{found['predictions']:,} predictions")
    return ", ".join(parts) + "."


def _losses(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Return the chart's lines in its own coordinates; None where there are no losses.

    A ring marks the dense loss and a smaller dot the pruned one, so neither hides the other. Rings
    of neighbours do not touch.
    """
    if len(pairs) < 2:
        return None
    ordered = sorted(pairs)
    drawn = min(_MOST, len(ordered))
    chosen = [ordered[i * (len(ordered) - 1) // (drawn - 1)] for i in range(drawn)]
    low, high = min(map(min, chosen)), max(map(max, chosen))
    room = max(high - low, 1e-9)

    def height(value: float) -> float:
        return round(_EDGE + (_HEIGHT - 2 * _EDGE) * (high - value) / room, 1)

    gap = (_WIDTH - _LEFT - _EDGE) / (drawn - 1)
    lines = [
        (round(_LEFT + gap * i, 1), height(a), height(b), f"dense {a:.3f}, pruned {b:.3f}")
        for i, (a, b) in enumerate(chosen)
    ]
    values = [low + room * i / _TICKS for i in range(_TICKS + 1)]
    ticks = [(f"{value:.2f}", height(value)) for value in values]
    ring = round(min(_RING, gap / 2 - _STROKE), 2)
    marks = {"ring": ring, "dot": round(ring - _STROKE / 2 - 0.2, 2), "stroke": _STROKE}
    return {"width": _WIDTH, "height": _HEIGHT, "lines": lines, "ticks": ticks, **marks,
            "samples": len(ordered)}  # fmt: skip


def _text(row: Mapping[str, str]) -> tuple[str, list[Any], list[Any]]:
    """Return a prompt, and both continuations as words; True where only that side has the word."""
    dense, small = row["dense"].split(), row["small"].split()
    matcher = SequenceMatcher(None, dense, small, autojunk=False)
    blocks = matcher.get_matching_blocks()
    same = {i for a, _, size in blocks for i in range(a, a + size)}
    same_small = {i for _, b, size in blocks for i in range(b, b + size)}
    return (
        row["prompt"],
        [(word, i not in same) for i, word in enumerate(dense)],
        [(word, i not in same_small) for i, word in enumerate(small)],
    )
