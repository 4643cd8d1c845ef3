"""`lobs sweep`: prune further and further, and find where the network breaks."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.files import makeable, unclaimed
from lobs.cli.options import (
    EXPERT,
    OUTPUT,
    CodeOption,
    ForceOption,
    JsonOption,
    LayersOption,
    MetricOption,
    SamplesOption,
    SkipOption,
    SolverOption,
    SubjectArgument,
    TrustOption,
)
from lobs.cli.output import Column, announce, print_json, print_table, say, working
from lobs.cli.values import parse_fraction
from lobs.errors import TargetError
from lobs.storage.atomic import make_folder
from lobs.storage.outputs import writable

if TYPE_CHECKING:
    from lobs.cli.subject import Subject
    from lobs.pruning.sweep import SweepPoint

VALUES = "Values"
PAPER = "L-OBS as published"
_DEFAULTS = {"keep": ("50%", "1%"), "epsilon": ("0.01", "0.6")}


@dataclass(frozen=True)
class Curve:
    """One method's points, dense to sparse, and the point after which it breaks."""

    method: str
    points: list[SweepPoint]
    knee: SweepPoint | None


def sweep(
    network: SubjectArgument,
    by: Annotated[
        str,
        typer.Option(
            help="keep (fraction kept) or epsilon (relative error of each layer).",
            metavar="KIND",
            rich_help_panel=VALUES,
        ),
    ] = "keep",
    start: Annotated[
        str | None,
        typer.Option(
            help="First value; 50% by keep, 0.01 by epsilon.",
            metavar="VALUE",
            rich_help_panel=VALUES,
        ),
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(
            help="Last value; 1% by keep, 0.6 by epsilon.", metavar="VALUE", rich_help_panel=VALUES
        ),
    ] = None,
    points: Annotated[
        int,
        typer.Option(
            min=2, max=1000, help="Number of values.", metavar="N", rich_help_panel=VALUES
        ),
    ] = 10,
    samples: SamplesOption = None,
    layers: LayersOption = None,
    skip: SkipOption = None,
    metric: MetricOption = None,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for sweep.csv and sweep.png (lobs-sweep by default), or a .csv file.",
            metavar="PATH",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
    solver: SolverOption = "auto",
    paper: Annotated[
        bool,
        typer.Option(
            "--paper/--no-paper",
            help="Leave out the second line, L-OBS as published.",
            rich_help_panel=EXPERT,
        ),
    ] = True,
) -> None:
    """Prune to smaller and smaller sizes, measure each, and mark where the metric breaks.

    The first line is what lobs prune does. The second is the paper's method, for comparison.

    Examples:
      lobs sweep lenet300
      lobs sweep mycode:network --start 30% --stop 2% --points 6 --out sweep.csv
    """
    if by not in _DEFAULTS:
        raise TargetError(f"--by {by}: use keep or epsilon.")
    first, last = _ends(by, start, stop)
    table, picture = _places(out, force)
    announce(table, json)

    from lobs.cli.subject import open_subject

    subject = open_subject(network, samples, trust=trust, network=code, metric=metric)
    subject.require_metric("lobs sweep")
    values = spaced(by, first, last, points)
    with working(json):
        chosen = {"by": by, "layers": layers, "skip": skip or (), "progress": not json}
        curves = _curves(subject, values, solver, paper, chosen)
    dense = subject.measure(subject.model)
    assert dense is not None
    make_folder(table.parent)
    written = [str(_write_csv(table, curves, subject))]
    if _write_png(picture, curves, subject, dense):
        written.append(str(picture))
    if json:
        documents = [
            {
                "method": curve.method,
                "points": [_document(p, subject) for p in curve.points],
                "inflection": None if curve.knee is None else _document(curve.knee, subject),
            }
            for curve in curves
        ]
        print_json({"dense": dense, "methods": documents, "files": written})
        return
    _print(subject, curves, by, dense)
    say("\n".join(written))
    if len(written) == 1:
        say("no picture: matplotlib is not installed; pip install 'lobs[plots]'")


def _ends(by: str, start: str | None, stop: str | None) -> tuple[float, float]:
    """Return the first and the last value; sizes fall, errors rise."""
    option = "--epsilon" if by == "epsilon" else "--keep"
    texts = (start or _DEFAULTS[by][0], stop or _DEFAULTS[by][1])
    first, last = (parse_fraction(text, option) for text in texts)
    if by == "keep" and not 1 >= first > last > 0:
        raise TargetError(
            f"--start {texts[0]} --stop {texts[1]}: sizes fall from start to stop and end above 0. "
            "Example: --start 50% --stop 1%."
        )
    if by == "epsilon" and not 0 <= first < last:
        raise TargetError(
            f"--start {texts[0]} --stop {texts[1]}: errors rise from start to stop. Example: "
            "--start 0.01 --stop 0.6."
        )
    return first, last


def _places(out: Path | None, force: bool) -> tuple[Path, Path]:
    """Return where the table and the picture go: into a folder, or beside a named file."""
    if out is not None and out.suffix.lower() in (".csv", ".png"):
        table, picture = out.with_suffix(".csv"), out.with_suffix(".png")
        writable(table)
        writable(picture)
        return table, picture
    folder = makeable(unclaimed(out, Path("lobs-sweep"), force=force))
    return folder / "sweep.csv", folder / "sweep.png"


def spaced(by: str, start: float, stop: float, points: int) -> list[float]:
    """Return values from start to stop: sizes evenly on a log scale, errors evenly."""
    import math

    steps = [i / (points - 1) for i in range(points)]
    if by == "keep":
        a, b = math.log(start), math.log(stop)
        return [math.exp(a + (b - a) * t) for t in steps]
    return [start + (stop - start) * t for t in steps]


def _curves(
    subject: Subject, values: list[float], solver: str, paper: bool, chosen: dict[str, Any]
) -> list[Curve]:
    from lobs.pruning.sweep import inflection, sweep_by_layer
    from lobs.pruning.sweep import sweep as run

    title = "lobs prune" if solver == "auto" else f"lobs prune --solver {solver}"
    found = {
        title: run(subject.model, subject.batches, subject.score, values, solver=solver, **chosen)
    }
    if paper:
        found[PAPER] = sweep_by_layer(
            subject.model, subject.batches, subject.score, values, solver="lobs", **chosen
        )
    return [Curve(method, points, inflection(points)) for method, points in found.items()]


def _document(point: SweepPoint, subject: Subject) -> dict[str, float]:
    return {**asdict(point), "metric": subject.in_metric(point.score)}


def _print(subject: Subject, curves: list[Curve], by: str, dense: float) -> None:
    columns: list[str | Column] = [
        by,
        "kept",
        Column("mean rel. layer error", 1),
        subject.metric,
        "breaks after",
    ]
    say(f"{subject.title}: dense {subject.metric} {dense:.4g}")
    for curve in curves:
        rows = [
            [
                f"{p.asked:.2%}" if by == "keep" else f"{p.asked:.4g}",
                f"{p.kept_fraction:.2%}",
                f"{p.relative_error:.4f}",
                f"{subject.in_metric(p.score):.4g}",
                "◀" if p is curve.knee else "",
            ]
            for p in curve.points
        ]
        print_table(curve.method, columns, rows)
        if curve.knee is None:
            say("no breaking point: it takes four points or more, and a metric that gets worse")
        say("")


def _write_csv(path: Path, curves: list[Curve], subject: Subject) -> Path:
    head = ["method", "asked", "kept_fraction", "relative_error", "score", "metric", "inflection"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for curve in curves:
            for p in curve.points:
                document = _document(p, subject)
                knee = int(p is curve.knee)
                writer.writerow([curve.method, *(document[k] for k in head[1:-1]), knee])
    return path


def _write_png(path: Path, curves: list[Curve], subject: Subject, dense: float) -> bool:
    """Draw metric and layer error against the weights kept; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(subject.title)
    for curve, colour in zip(curves, ("#0072B2", "#D55E00"), strict=False):
        kept = [100 * p.kept_fraction for p in curve.points]
        style: dict[str, Any] = {"color": colour, "markersize": 4, "label": curve.method}
        left.plot(kept, [subject.in_metric(p.score) for p in curve.points], "o-", **style)
        right.plot(kept, [max(p.relative_error, 1e-12) for p in curve.points], "o-", **style)
        if curve.knee is not None:
            for axes in (left, right):
                x = 100 * curve.knee.kept_fraction
                axes.axvline(x, color=colour, linestyle="--", linewidth=1, alpha=0.6)
    left.axhline(dense, color="0.6", linewidth=1, linestyle=":", label="dense")
    left.set(ylabel=subject.metric)
    right.set(ylabel="mean relative layer error", yscale="log")
    for axes in (left, right):
        axes.set(xlabel="weights kept (%)", xscale="log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.invert_xaxis()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
