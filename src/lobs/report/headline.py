"""What a run achieved, in words and in one chart: weights, file, mistakes and speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lobs.calibration.forward import call, evaluating, main_output
from lobs.errors import LobsError
from lobs.pruning.summary import stay
from lobs.report import pictures
from lobs.report.figures import Figure, axis, bars, figure, height, rows_of
from lobs.report.words import fixed, percent, relative, short_names, size, times
from lobs.storage.compact.tensors import encode

if TYPE_CHECKING:
    from lobs.report import Run

_LARGEST = 50_000_000  # numbers in a network that is encoded to learn the size of its file
_MANY = 10_000  # mistakes are counted in this number of answers


@dataclass(frozen=True)
class Fact:
    """One sentence of the headline: the part in bold, and the rest."""

    bold: str
    rest: str = ""


@dataclass(frozen=True)
class Facts:
    """The numbers of one run that a reader repeats. None where a number is not known."""

    run: Run
    bytes_before: int | None
    bytes_after: int | None
    agreement: tuple[int, int] | None  # equal answers, and answers in all

    @property
    def mistakes(self) -> int | None:
        """Return how many more mistakes in 10,000 are made, for scores in percent."""
        before, after = self.run.error_before, self.run.error_after
        metric = self.run.metric
        if before is None or after is None or not metric.endswith("(%)"):
            return None
        if not math.isfinite(after - before):
            return None
        more = after - before if "error" in metric else before - after
        return round(more * _MANY / 100)

    @property
    def speedup(self) -> float | None:
        """Return the dense network's time over the pruned one's, if both were measured."""
        before, after = self.run.seconds_before, self.run.seconds_after
        return before / after if before and after else None

    def sentences(self) -> list[Fact]:
        """Return the headline of the run."""
        pruning = self.run.pruning
        found = [
            Fact(
                f"{times(pruning.total / max(1, pruning.kept))} fewer weights:",
                f"{pruning.kept:,} of {pruning.total:,} are left.",
            )
            if pruning.kept < pruning.total
            else Fact("No weight was removed.")
        ]
        if self.bytes_before and self.bytes_after:
            before, after = size(self.bytes_before), size(self.bytes_after)
            found.append(Fact(f"File {before} → {after}", "as a compact file."))
        found += self._quality()
        if self.speedup is not None and self.run.seconds_after is not None:
            faster = self.speedup >= 1
            factor = self.speedup if faster else 1 / self.speedup
            found.append(
                Fact(
                    f"{times(factor)} {'faster' if faster else 'slower'}:",
                    f"{_time(self.run.seconds_before)} → {_time(self.run.seconds_after)} a call.",
                )
            )
        return found

    def _quality(self) -> list[Fact]:
        run = self.run
        found = []
        name, unit = unit_of(run.metric)
        if run.error_before is not None and run.error_after is not None:
            change = f"{fixed(run.error_before)} → {fixed(run.error_after)}{unit}"
            title = f"{name[:1].upper()}{name[1:]} {change}"
            found.append(
                Fact(f"{title}.")
                if self.mistakes is None
                else Fact(f"{title}:", f"{in_words(self.mistakes)}.")
            )
        elif run.error_after is not None:
            found.append(Fact(f"{name[:1].upper()}{name[1:]} {fixed(run.error_after)}{unit}."))
        elif self.agreement is not None:
            same, of = self.agreement
            found.append(
                Fact(
                    f"Same answer on {same:,} of {of:,} inputs",
                    "as the dense network.",
                )
            )
        certificate = run.pruning.certificate
        moved, certified = certificate.relative(certificate.measured), certificate.certified
        if not found and moved is not None:
            stays = f"; {stay(certified)}" if certified else ""
            found.append(
                Fact(
                    f"The output changed by {percent(moved)}", f"on the calibration samples{stays}."
                )
            )
        elif certified:
            words = "On the calibration samples"
            found.append(Fact(words, f"{stay(certified)}."))
        if certificate.guarantee is not None:
            found.append(Fact(certificate.guarantee.claim, f"{certificate.guarantee.scope}."))
        return found

    def change(self) -> str:
        """Return the change of the run's quality in a few words, for a table."""
        if self.mistakes is not None:
            sign = "±" if not self.mistakes else "+" if self.mistakes > 0 else "−"
            return f"{sign}{abs(self.mistakes):,} in {_MANY:,}"
        if self.agreement is not None:
            return f"{percent(self.agreement[0] / self.agreement[1])} same answers"
        certificate = self.run.pruning.certificate
        if certificate.measured is None:
            return "–"
        return f"output by {relative(certificate.measured, certificate)}"


def facts(run: Run) -> Facts:
    """Collect what is known about a run, and measure file sizes and agreement where possible."""
    after = pictures.weights(pictures.pruned_network(run))
    before = pictures.weights(run.dense) if run.dense is not None else after
    return Facts(
        run,
        _tensor_bytes(before) if run.bytes_before is None else run.bytes_before,
        _compact_bytes(after) if run.bytes_after is None else run.bytes_after,
        _agreement(run),
    )


def in_words(mistakes: int) -> str:
    """Write a number of additional mistakes in 10,000.

    >>> in_words(4), in_words(-12), in_words(0)
    ('4 more mistakes in 10,000', '12 fewer mistakes in 10,000', 'as many mistakes as before')
    """
    if not mistakes:
        return "as many mistakes as before"
    noun = "mistake" if abs(mistakes) == 1 else "mistakes"
    return f"{abs(mistakes):,} {'more' if mistakes > 0 else 'fewer'} {noun} in {_MANY:,}"


def unit_of(metric: str) -> tuple[str, str]:
    """Split a metric into its name and the unit to write after its number."""
    return (metric[:-4], "\u202f%") if metric.endswith(" (%)") else (metric, "")


def chart(found: Sequence[Facts]) -> Figure:
    """Draw the result itself: one run against the dense network, or several runs by their error."""
    return _against_dense(found[0]) if len(found) == 1 else _side_by_side(found)


def _against_dense(one: Facts) -> Figure:
    """Draw what is left of weights, file, mistakes and time, in percent of the dense network."""
    run, pruning = one.run, one.run.pruning
    rows = [("weights", pruning.kept_fraction, f"{pruning.kept:,} of {pruning.total:,} weights")]
    if one.bytes_before and one.bytes_after:
        words = f"{size(one.bytes_before)} → {size(one.bytes_after)}"
        rows.append(("file", one.bytes_after / one.bytes_before, words))
    before, after = run.error_before, run.error_after
    if before and after is not None and math.isfinite(after / before):
        name, unit = unit_of(run.metric)
        rows.append((name, after / before, f"{fixed(before)} → {fixed(after)}{unit}"))
    if run.seconds_before and run.seconds_after:
        words = f"{_time(run.seconds_before)} → {_time(run.seconds_after)}"
        rows.append(("time per call", run.seconds_after / run.seconds_before, words))
    shares = [100 * share for _, share, _ in rows]
    trace = bars(0, shares, [f"{name}: {words}" for name, _, words in rows])
    trace |= {"text": [percent(share) for _, share, _ in rows], "textposition": "outside"}
    x = axis("percent of the dense network", range=[0, max(100.0, *shares) * 1.02])
    drawn = figure([trace], height(len(rows), 1, 26), x, rows_of([name for name, *_ in rows]))
    drawn["layout"]["guide"] = {"x": 100, "text": "dense network"}
    return drawn


def _side_by_side(found: Sequence[Facts]) -> Figure:
    """Draw one bar per run: its test error, else the change of its output, else its weights."""
    runs = [one.run for one in found]
    errors = [_finite(run.error_after) for run in runs]
    changes = [c.relative(c.measured) for c in (run.pruning.certificate for run in runs)]
    guide = None
    if len({run.metric for run in runs}) == 1 and any(x is not None for x in errors):
        _, unit = unit_of(runs[0].metric)
        values, title = errors, runs[0].metric
        words = ["" if x is None else f"{fixed(x)}{unit}" for x in errors]
        dense = {run.error_before for run in runs}
        if len(dense) == 1 and (before := _finite(dense.pop())) is not None:
            guide = {"x": before, "text": f"dense network: {fixed(before)}{unit}"}
    elif all(x is not None for x in changes):
        values = [_finite(100 * x) if x is not None else None for x in changes]
        title = "change of the output (% of its norm)"
        words = [percent(x) if x is not None else "" for x in changes]
    else:
        values = [100 * run.pruning.kept_fraction for run in runs]
        title, words = "weights kept (%)", [percent(run.pruning.kept_fraction) for run in runs]
    hover = [
        f"{run.label}: {word or 'not measured'}\n{percent(run.pruning.kept_fraction)} kept"
        for run, word in zip(runs, words, strict=True)
    ]
    trace = bars(0, values, hover) | {"text": words, "textposition": "outside"}
    trace["marker"] = {"color": [bars(i, [], [])["marker"]["color"] for i in range(len(runs))]}
    x = axis(title, rangemode="tozero")
    labels = short_names([run.label for run in runs])
    drawn = figure([trace], height(len(runs), 1, 22), x, rows_of(labels))
    if guide is not None:
        drawn["layout"]["guide"] = guide
    return drawn


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _tensor_bytes(state: Mapping[str, Tensor] | None) -> int | None:
    if state is None:
        return None
    return sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))


def _compact_bytes(state: Mapping[str, Tensor] | None) -> int | None:
    """Return the bytes of a network's tensors in a compact file, or None if it is too large."""
    if state is None:
        return None
    tensors = {name: t.detach() for name, t in state.items() if isinstance(t, Tensor)}
    if sum(t.numel() for t in tensors.values()) > _LARGEST:
        return None
    total = 0
    for name, tensor in tensors.items():
        _, parts = encode(name, tensor.cpu().contiguous(), None, "same")
        total += sum(part.numel() * part.element_size() for part in parts.values())
    return total


def _agreement(run: Run) -> tuple[int, int] | None:
    """Count the inputs of the example that both networks put into the same class."""
    dense, pruned = run.dense, pictures.pruned_network(run)
    if not isinstance(dense, nn.Module) or not isinstance(pruned, nn.Module):
        return None
    if run.example is None:
        return None
    try:
        with torch.no_grad(), evaluating(dense), evaluating(pruned):
            answers = [main_output(call(model, run.example)) for model in (dense, pruned)]
    except (LobsError, RuntimeError):  # the example may not fit; the report does without
        return None
    first, second = answers
    if first is None or second is None or first.dim() != 2 or first.shape != second.shape:
        return None
    if first.shape[1] < 2 or not len(first):
        return None
    return int((first.argmax(dim=1) == second.argmax(dim=1)).sum()), len(first)
