"""The page: figures, tables and words put into a template."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lobs.report import figures, panels, pictures, tables, waterfall, whatif, words

if TYPE_CHECKING:
    from lobs.report import Run

_SIDE_BY_SIDE = 6  # more layers than this are shown one at a time


class Panel(NamedTuple):
    """A figure about one layer, and a line of words under it."""

    id: str
    layer: str
    figure: figures.Figure
    note: str = ""


def render(runs: Sequence[Run], *, title: str, command: str, seed: int | None) -> str:
    """The whole page as text."""
    wide = {
        "kept": figures.kept(runs),
        "relative": figures.relative_errors(runs),
        "bounds": figures.bounds(runs),
    }
    histograms, curves, ledgers = _histograms(runs[0]), _curves(runs), _ledgers(runs)
    page = _templates().get_template("page.html.j2")
    return page.render(
        title=title,
        command=command,
        seed=seed,
        runs=runs,
        side_by_side=_SIDE_BY_SIDE,
        histograms=histograms,
        curves=curves,
        ledgers=ledgers,
        mended={run.pruning.settings.get("inputs") == "asymmetric" for run in runs},
        slider=whatif.slider(runs),
        absences={run.label: whatif.absence(run) for run in runs if run.pruning.preview is None},
        pixels=pictures.pixels(runs),
        gallery=pictures.gallery(runs),
        figures={name: figure for name, figure in wide.items() if figure}
        | {p.id: p.figure for p in histograms + curves + ledgers},
        styles=[
            (figures.COLOURS[i % len(figures.COLOURS)], figures.MARKS[i % len(figures.MARKS)][1])
            for i in range(len(runs))
        ],
        refusals=_refusals(runs),
        plotly=Markup(get_plotlyjs()),
    )


def _histograms(run: Run) -> list[Panel]:
    """The main run's alone: sensitivities describe the layers before anything is removed."""
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


def _refusals(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs without a bound by the reason for it: usually the network's shape, and then the same for all."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.pruning.certificate.bound is None:
            found.setdefault(run.pruning.certificate.reason or "no reason was recorded", []).append(
                run
            )
    return found


def _templates() -> Environment:
    loader = FunctionLoader(
        lambda name: (resources.files("lobs.report") / name).read_text(encoding="utf-8")
    )
    templates = Environment(
        autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True
    )
    # Were a number that is not JSON to slip through, better an error here than a blank page at the
    # reader's.
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates.filters |= {
        "number": words.number,
        "fixed": words.fixed,
        "percent": words.percent,
        "plain": words.plain,
    }
    templates.globals |= {"tables": tables}
    return templates
