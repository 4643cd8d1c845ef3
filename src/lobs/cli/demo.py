"""`lobs demo`: a real network, real data, four methods, one table."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.options import DATA, OUTPUT, JsonOption
from lobs.cli.output import Column, command_line, optional, print_json, print_table, say
from lobs.storage.atomic import make_folder

if TYPE_CHECKING:
    from lobs.cli.subject import Subject
    from lobs.pruning.result import PruningResult
    from lobs.report import Run

# 7.0 % of all weights; the small last layers keep more, as in the paper.
KEPT = {"fc1": 0.051, "fc2": 0.20, "fc3": 0.65}
DEFAULTS = "lobs prune (defaults)"
METHODS = {
    "lobs": "L-OBS as published",
    "magnitude": "magnitude",
    "greedy": "greedy OBS",
    "auto": DEFAULTS,
}


def demo(
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="Training images to calibrate on.", metavar="N", rich_help_panel=DATA
        ),
    ] = 60_000,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the report and the network.", metavar="FOLDER", rich_help_panel=OUTPUT
        ),
    ] = Path("lobs-demo"),
    json: JsonOption = False,
) -> None:
    """Prune LeNet-300-100 to 7 % of its weights with four methods, without retraining.

    It takes about a minute and writes a report and the pruned network.

    Example:
      lobs demo --out my-demo
    """
    folder = make_folder(out)
    if not json:
        say(f"results go to {folder}")
    from lobs.cli.subject import open_subject
    from lobs.report import write_report

    subject = open_subject("lenet300", samples)
    before = subject.measure(subject.model)
    runs, best = _runs(subject, before, quiet=json)
    report = write_report(
        folder / "report.html",
        runs[::-1],
        title="LeNet-300-100 at 7 % of its weights",
        command=command_line(),
    )
    facts: dict[str, Any] = {
        "before": before,
        "after": runs[-1].error_after,
        "metric": runs[-1].metric,
        "command": command_line(),
    }
    network = best.save(folder / "lenet300-7pct.safetensors", **subject.provenance(), **facts)
    if json:
        rows = [
            {
                "method": r.label,
                "error_before": before,
                "error_after": r.error_after,
                **r.pruning.record(),
            }
            for r in runs
        ]
        print_json({"runs": rows, "report": str(report), "network": str(network)})
        return
    _table(runs, before)
    say(f"report   {report}\nnetwork  {network}")
    say(f"again    {_program()} prune lenet300 --keep 7%\nnext     {_program()} verify {network}")


def _runs(subject: Subject, before: float | None, quiet: bool) -> tuple[list[Run], PruningResult]:
    """Prune by every method; return their runs and the result of the last, the defaults."""
    from lobs.pruning.api import prune
    from lobs.pruning.options import Execution
    from lobs.report import Run
    from lobs.targets import Sparsity

    by_layer = Sparsity({name: 1 - kept for name, kept in KEPT.items()})
    example = next(iter(subject.batches))
    runs: list[Run] = []
    for solver, label in METHODS.items():
        if not quiet:
            say(f"pruning {subject.title}: {label} …")
        # The defaults share the same number of weights among the layers by themselves.
        ours = solver == "auto"
        result = prune(
            subject.model,
            subject.batches,
            Sparsity(1 - runs[0].pruning.kept_fraction) if ours else by_layer,
            solver=solver,
            inputs="asymmetric" if ours else "dense",
            held_out=subject.held_out,
            progress=not quiet,
            execution=Execution(diagnostics=ours),
        )
        after = subject.measure(result.model)
        runs.append(Run(label, result, before, after, dense=subject.model, example=example))
    return runs, result


def _program() -> str:
    """Return how to call this command here: by name if that finds it, else by its path."""
    found = shutil.which("lobs")
    place = Path(sys.argv[0])
    if place.name == "__main__.py":
        return "python -m lobs"
    if (found and Path(found).resolve() == place.resolve()) or not place.is_file():
        return "lobs"
    return str(place)


def _table(runs: list[Run], before: float | None) -> None:
    rows = [
        [
            run.label,
            f"{run.pruning.kept_fraction:.1%}",
            f"{optional(before, '.2f')} → {optional(run.error_after, '.2f')}",
            f"{run.pruning.error:.4g}",
            optional(run.pruning.certificate.measured),
            optional(run.pruning.certificate.held_out),
            optional(run.pruning.certificate.bound),
            f"{run.pruning.seconds:.1f}",
        ]
        for run in runs
    ]
    columns: list[str | Column] = [
        "method",
        "kept",
        "test error (%)",
        Column("ΣE of layers", 3),
        Column("output change", 1),
        Column("on test data", 2),
        Column("bound", 2),
        "seconds",
    ]
    kept = ", ".join(f"{name} {100 * share:g} %" for name, share in KEPT.items())
    print_table(
        "LeNet-300-100 on MNIST, no retraining",
        columns,
        rows,
        note=f"kept by layer: {kept}; the defaults share one budget",
    )
