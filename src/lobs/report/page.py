"""The page: figures, tables and words put into a template."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from lobs.report import figures, headline, panels, pictures, tables, waterfall, whatif, words

if TYPE_CHECKING:
    from lobs.report import Run

_SIDE_BY_SIDE = 6  # more layers than this are shown one at a time


class Panel(NamedTuple):
    """A figure about one layer or one run, and a line of words under it."""

    id: str
    layer: str
    figure: figures.Figure
    note: str = ""


def render(runs: Sequence[Run], *, title: str, command: str, seed: int | None) -> str:
    """Return the whole page as text.

    Args:
        runs: the main run first.
        title: the page's heading.
        command: the command that gives these numbers again.
        seed: shown beside the command, if one was used.
    """
    found = [headline.facts(run) for run in runs]
    wide = {
        "result": headline.chart(found),
        "kept": figures.kept(runs),
        "relative": figures.relative_errors(runs),
        "bounds": figures.bounds(runs),
    }
    histograms, curves, ledgers = _histograms(runs[0]), _curves(runs), _ledgers(runs)
    page = templates().get_template("page.html.j2")
    return page.render(
        title=title,
        command=command,
        seed=seed,
        runs=list(runs),
        facts=found,
        columns=tables.headline(found),
        details=tables.details(runs),
        side_by_side=_SIDE_BY_SIDE,
        histograms=histograms,
        curves=curves,
        ledgers=ledgers,
        corrected={run.pruning.settings.get("inputs") == "asymmetric" for run in runs},
        slider=whatif.slider(runs),
        absences=_absences(runs, wide["bounds"] is not None),
        pixels=pictures.pixels(runs),
        gallery=pictures.gallery(runs),
        figures={name: figure for name, figure in wide.items() if figure}
        | {p.id: p.figure for p in histograms + curves + ledgers},
        styles=[
            (figures.COLOURS[i % len(figures.COLOURS)], figures.MARKS[i % len(figures.MARKS)])
            for i in range(len(runs))
        ],
    )


def _histograms(run: Run) -> list[Panel]:
    """Return the main run's histograms only: sensitivities describe the dense layers."""
    drawn = [(i, x, panels.sensitivity(x.sensitivity)) for i, x in enumerate(run.pruning.layers)]
    return [
        Panel(f"sensitivity-{i}", x.name, figure, panels.sensitivity_note(x.sensitivity))
        for i, x, figure in drawn
        if figure and x.sensitivity
    ]


def _curves(runs: Sequence[Run]) -> list[Panel]:
    drawn = [
        (i, name, panels.error_curve(name, runs))
        for i, name in enumerate(figures.layer_names(runs))
    ]
    return [Panel(f"curve-{i}", name, figure) for i, name, figure in drawn if figure]


def _ledgers(runs: Sequence[Run]) -> list[Panel]:
    drawn = [(i, run, waterfall.waterfall(run)) for i, run in enumerate(runs)]
    return [Panel(f"ledger-{i}", run.label, figure) for i, run, figure in drawn if figure]


def _absences(runs: Sequence[Run], bounds: bool) -> list[tuple[str, str]]:
    """Return what the page does not show, and why, so that no panel stays empty."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        certificate = run.pruning.certificate
        if run.note:
            found.setdefault(("Pictures", run.note.rstrip(".")), []).append(run.label)
        if run.pruning.preview is None:
            found.setdefault(("Slider", whatif.absence(run)), []).append(run.label)
        if certificate.bound is None:
            why = certificate.reason or "no reason was recorded"
            found.setdefault(("Bound", why), []).append(run.label)
        elif not bounds:
            why = (
                "with asymmetric inputs layer errors are measured in the pruned network, so the "
                "bound equals the measured change"
            )
            found.setdefault(("Chart of the bound", why), []).append(run.label)
    return [
        (name if len(labels) == len(runs) else f"{name} ({', '.join(labels)})", why)
        for (name, why), labels in found.items()
    ]


def templates() -> Environment:
    """Return the package's templates, with the filters of `words`."""
    loader = FunctionLoader(
        lambda name: (resources.files("lobs.report") / name).read_text(encoding="utf-8")
    )
    templates = Environment(
        autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True
    )
    # A number that JSON cannot hold raises here; otherwise the reader would see a blank page.
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates.filters |= {
        "number": words.number,
        "fixed": words.fixed,
        "percent": words.percent,
        "plain": words.plain,
    }
    templates.globals |= {"tables": tables}
    return templates
