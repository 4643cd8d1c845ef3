"""`lobs sweep`: how far can it go before it breaks?"""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lobs.cli.common import (
    JsonOption,
    LayersOption,
    SamplesOption,
    SkipOption,
    SolverOption,
    SubjectArgument,
    TrustOption,
    makeable,
    notes,
    print_json,
    print_table,
    say,
    unclaimed,
)
from lobs.storage.atomic import make_folder

if TYPE_CHECKING:
    from lobs.pruning.sweep import SweepPoint


def sweep(
    network: SubjectArgument,
    by: Annotated[
        str, typer.Option(help="ratio (fraction removed) or epsilon (relative layer error).")
    ] = "ratio",
    start: Annotated[
        float | None, typer.Option(help="First value; 0.5 by ratio, 0.01 by epsilon.")
    ] = None,
    stop: Annotated[
        float | None, typer.Option(help="Last value; 0.99 by ratio, 0.6 by epsilon.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, max=1000, help="How many values.")] = 15,
    solver: SolverOption = "exact",
    samples: SamplesOption = None,
    layers: LayersOption = None,
    skip: SkipOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for sweep.csv and sweep.png; lobs-sweep by default.")
    ] = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Prune further and further, evaluate each time, and mark the pruning inflection point.

    Values are spaced closer towards the far end of a ratio, where things happen. Example: `lobs
    sweep lenet300 --layers fc1`
    """
    from lobs.errors import LobsError, TargetError

    first = start if start is not None else 0.5 if by == "ratio" else 0.01
    last = stop if stop is not None else 0.99 if by == "ratio" else 0.6
    if by not in ("ratio", "epsilon"):
        raise TargetError(f"--by {by}: use ratio or epsilon.")
    if not 0 <= first < last or (by == "ratio" and last > 1):
        raise TargetError(
            f"--start {first:g} --stop {last:g}: start must come before stop, and a ratio ends at "
            "1."
        )
    folder = makeable(unclaimed(out, Path("lobs-sweep")))

    from lobs.cli.subject import open_subject
    from lobs.pruning.sweep import inflection
    from lobs.pruning.sweep import sweep as run

    subject = open_subject(network, samples, trust=trust)
    if subject.evaluate is None:
        raise LobsError(
            f"'{network}' returns no evaluate function: return (model, batches, evaluate)."
        )
    values = spaced(by, first, last, points)
    with notes():
        found = run(
            subject.model,
            subject.batches,
            subject.evaluate,
            values,
            by=by,  # type: ignore[arg-type]  # checked by sweep, with the choices in its message
            solver=solver,
            layers=layers,
            skip=skip or (),
            progress=not json,
        )
    knee = inflection(found)
    dense = subject.score(subject.model)
    target = make_folder(folder)
    written = [str(_write_csv(target / "sweep.csv", found, knee))]
    picture = _write_png(
        target / "sweep.png", found, knee, dense, f"{subject.title}, {solver}", subject.metric
    )
    written += [str(picture)] if picture else []
    if json:
        mark = None if knee is None else asdict(knee)
        print_json(
            {
                "dense": dense,
                "points": [asdict(p) for p in found],
                "inflection": mark,
                "files": written,
            }
        )
        return
    rows = [
        [
            f"{p.asked:.4g}",
            f"{p.kept_fraction:.2%}",
            f"{p.relative_error:.4f}",
            f"{p.score:.4g}",
            "◀" if p is knee else "",
        ]
        for p in found
    ]
    columns = [by, "kept", "mean rel. layer error", subject.metric, "inflection"]
    print_table(f"{subject.title}: {solver}; dense {subject.metric} {dense:.4g}", columns, rows)
    if knee is None:
        say("no inflection point: it takes four points or more, and a score that rises")
    say("\n".join(written))
    if picture is None:
        say("no picture: matplotlib is not installed; pip install 'lobs[plots]'")


def spaced(by: str, start: float, stop: float, points: int) -> list[float]:
    """Values from start to stop: even in what is kept on a log scale for ratios below 1, even otherwise."""
    import math

    steps = [i / (points - 1) for i in range(points)]
    if by == "ratio" and max(start, stop) < 1:
        a, b = math.log(1 - start), math.log(1 - stop)
        return [1 - math.exp(a + (b - a) * t) for t in steps]
    return [start + (stop - start) * t for t in steps]


def _write_csv(path: Path, points: list[SweepPoint], knee: SweepPoint | None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["asked", "kept_fraction", "relative_error", "score", "inflection"])
        writer.writerows(
            [p.asked, p.kept_fraction, p.relative_error, p.score, int(p is knee)] for p in points
        )
    return path


def _write_png(
    path: Path,
    points: list[SweepPoint],
    knee: SweepPoint | None,
    dense: float | None,
    title: str,
    metric: str,
) -> Path | None:
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    removed = [100 * (1 - p.kept_fraction) for p in points]
    left.plot(removed, [p.score for p in points], "o-", color="#0072B2", markersize=4)
    if dense is not None:
        left.axhline(dense, color="0.6", linewidth=1, linestyle=":")
        left.annotate(
            "dense",
            (removed[0], dense),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=9,
            color="0.4",
        )
    left.set(xlabel="weights removed (%)", ylabel=metric)
    figure.suptitle(title)
    right.semilogy(
        removed, [max(p.relative_error, 1e-12) for p in points], "o-", color="#D55E00", markersize=4
    )
    right.set(xlabel="weights removed (%)", ylabel="mean relative layer error")
    right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(
        lambda value, _: f"{value:g}"
    )  # 0.05 reads better than 5 × 10⁻²
    right.yaxis.set_minor_formatter(ticker.NullFormatter())
    for axes, value in ((left, "score"), (right, "relative_error")):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if knee is not None:
            x = 100 * (1 - knee.kept_fraction)
            axes.axvline(x, color="0.5", linestyle="--", linewidth=1)
            axes.annotate(
                f"inflection\n{x:.1f} % removed", (x, max(getattr(knee, value), 1e-12)), xytext=(-8, 24),
                textcoords="offset points", ha="right", fontsize=9, color="0.3",
            )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
