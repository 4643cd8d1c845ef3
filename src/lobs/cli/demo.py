"""`lobs demo`: a real network, real data, four methods, one table."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lobs.cli.common import JsonOption, command_line, notes, optional, print_json, print_table, say
from lobs.storage.atomic import make_folder

if TYPE_CHECKING:
    from lobs.pruning.result import PruningResult
    from lobs.report import Run

# 7.0 % of all weights; the small last layers keep more, as in the paper.
KEPT = {"fc1": 0.051, "fc2": 0.20, "fc3": 0.65}
METHODS = {
    "lobs": "L-OBS as published",
    "magnitude": "magnitude",
    "greedy": "exact",
    "auto": "the defaults",
}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the pruned network.")] = Path(
        "lobs-demo"
    ),
    samples: Annotated[int, typer.Option(min=1, help="Training images to calibrate on.")] = 60_000,
    json: JsonOption = False,
) -> None:
    """Prune LeNet-300-100 to 7 % of its weights with four methods; no retraining, about a minute.

    Writes a report and the pruned network, and says where. Example: `lobs demo --out /tmp/demo`
    """
    from lobs.cli.subject import open_subject
    from lobs.pruning.api import prune
    from lobs.report import Run, write_report
    from lobs.targets import Sparsity

    target_folder = make_folder(out)
    subject = open_subject("lenet300", samples)
    before = subject.score(subject.model)
    by_layer = Sparsity({name: 1 - kept for name, kept in KEPT.items()})
    runs: list[Run] = []
    pruned: list[PruningResult] = []
    with notes():
        for solver, label in METHODS.items():
            if not json:
                say(f"pruning {subject.title} by {label} …")
            # Ours shares the same number of weights out by itself, and mends each layer on what the
            # pruned ones before it give.
            ours = solver == "auto"
            result = prune(
                subject.model,
                subject.batches,
                Sparsity(1 - runs[0].pruning.kept_fraction) if ours else by_layer,
                solver=solver,
                inputs="asymmetric" if ours else "dense",
                diagnostics=ours,
                held_out=subject.held_out,
            )
            pruned.append(result)
            after, example = subject.score(result.model), next(iter(subject.batches))
            runs.append(Run(label, result, before, after, dense=subject.model, example=example))
    best = runs[-1]
    report = write_report(
        target_folder / "report.html",
        runs[::-1],
        title="LeNet-300-100 at 7 % of its weights",
        command=command_line(),
    )
    facts = {
        "before": before,
        "after": best.error_after,
        "metric": best.metric,
        "command": command_line(),
    }
    network = pruned[-1].save(
        target_folder / "lenet300-7pct.safetensors", **subject.provenance(), **facts
    )
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


def _program() -> str:
    """How to call this command here: by name if it is on the path, by its place if not."""
    found = shutil.which("lobs")
    place = Path(sys.argv[0])
    if (found and Path(found).resolve() == place.resolve()) or not place.is_file():
        return "lobs"
    return str(place)


def _table(runs: list[Run], before: float | None) -> None:
    rows = [
        [
            run.label,
            f"{run.pruning.kept:,} ({run.pruning.kept_fraction:.1%})",
            f"{optional(before, '.2f')} → {optional(run.error_after, '.2f')}",
            f"{run.pruning.error:.4g}",
            optional(run.pruning.certificate.bound),
            optional(run.pruning.certificate.measured),
            optional(run.pruning.certificate.held_out),
            f"{run.pruning.seconds:.1f}",
        ]
        for run in runs
    ]
    columns = [
        "method",
        "kept",
        "test error (%)",
        "layer error ΣE",
        "output bound",
        "measured",
        "held out",
        "seconds",
    ]
    kept = ", ".join(f"{name} {100 * share:g} %" for name, share in KEPT.items())
    print_table(
        "LeNet-300-100 on MNIST, no retraining",
        columns,
        rows,
        note=f"kept by layer: {kept}; the defaults by one budget",
    )
