"""`lobs stages`: prune and retrain in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lobs.cli.files import default_name, distinct, file_of, output_file
from lobs.cli.options import (
    MACHINE,
    CodeOption,
    ForceOption,
    InputsOption,
    JsonOption,
    MetricOption,
    OutOption,
    SamplesOption,
    SolverOption,
    SubjectArgument,
    TrustOption,
)
from lobs.cli.output import announce, optional, print_json, say, working
from lobs.cli.training_data import (
    BatchOption,
    DecayOption,
    DistilOption,
    OptimizerOption,
    RateOption,
    SeedOption,
    Training,
)
from lobs.cli.values import complement, parse_fractions
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.cli.subject import Subject
    from lobs.pruning.options import PruneOptions
    from lobs.training.settings import RetrainOptions
    from lobs.training.staged import Stage, StagedResult, StageResult

STAGES = "Stages"


def stages(
    network: SubjectArgument,
    plan: Annotated[
        str,
        typer.Option(
            "--stages",
            help="KEEP:ITERATIONS for each stage, such as '5%:200;fc1=1%,fc*=4%:443'.",
            metavar="STAGES",
            rich_help_panel=STAGES,
        ),
    ],
    scope: Annotated[
        str | None,
        typer.Option(
            help="network: share one number among the layers (default). layer: the same for each.",
            metavar="KIND",
            rich_help_panel=STAGES,
        ),
    ] = None,
    batch: BatchOption = None,
    rate: RateOption = None,
    optimizer: OptimizerOption = "sgd",
    decay: DecayOption = "constant",
    distil: DistilOption = False,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
    metric: MetricOption = None,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder of finished stages. The same command continues from there.",
            metavar="FOLDER",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    solver: SolverOption = "auto",
    inputs: InputsOption = None,
) -> None:
    """Prune, retrain, prune further, retrain: any number of stages.

    Examples:
      lobs stages lenet300 --stages "5%:200;1.5%:443" --distil
      lobs stages mycode:network --stages "30%:500;10%:1000"
    """
    target = output_file(out, default_name(network, "staged"), force=force)
    distinct(target, "--out", file_of(network))
    read = parse_stages(plan, scope)
    announce(target, json)

    from lobs.cli.subject import open_subject
    from lobs.storage import checkpoint

    subject = open_subject(network, samples, trust=trust, network=code, metric=metric)
    training = Training(batch, rate, optimizer, decay, distil, seed)
    settings = training.settings(subject)
    with working(json):
        done = _run(subject, read, settings, {"solver": solver, "inputs": inputs}, resume, not json)
    rows = [_row(stage, subject) for stage in done.stages]
    record = {**subject.provenance(), "stages": rows}
    path = checkpoint.save(done.model, target, done.masks, record)
    if json:
        facts = {"iterations": done.iterations, "seconds": done.seconds, "path": str(path)}
        print_json({"stages": rows, **facts})
        return
    for index, row in enumerate(rows, start=1):
        say(
            f"stage {index}: {row['kept']:,} of {row['total']:,} weights kept "
            f"({row['kept_fraction']:.2%})"
        )
        say(
            f"  {subject.metric}: {optional(row['pruned'])} after pruning, "
            f"{optional(row['retrained'])} after {row['iterations']} iterations"
        )
    say(f"network: {path}")


def parse_stages(text: str, scope: str | None = None) -> list[Stage]:
    """Read 'KEEP:ITERATIONS' for every stage, separated by semicolons."""
    from lobs.targets import Sparsity
    from lobs.training.staged import Stage

    plan = []
    for part in (p for p in text.split(";") if p.strip()):
        keep, colon, count = part.rpartition(":")
        if not colon or not count.strip().isdecimal():
            raise LobsError(f"--stages '{part}' is not KEEP:ITERATIONS. Example: 5%:200;1.5%:443.")
        extra: dict[str, Any] = {} if scope is None else {"scope": scope}
        plan.append(
            Stage(Sparsity(complement(parse_fractions(keep, "--stages")), **extra), int(count))
        )
    return plan


def _run(
    subject: Subject,
    plan: list[Stage],
    settings: dict[str, Any],
    pruning: dict[str, Any],
    resume: Path | None,
    progress: bool,
) -> StagedResult:
    from lobs.pruning.options import Execution
    from lobs.training.staged import prune_in_stages

    arguments = dict(settings)
    return prune_in_stages(
        subject.model,
        subject.batches,
        arguments.pop("data"),
        plan,
        evaluate=subject.evaluate and subject.score,
        pruning=cast("PruneOptions", pruning),
        retraining=cast("RetrainOptions", arguments),
        execution=Execution(resume=resume),
        progress=progress,
    )


def _row(stage: StageResult, subject: Subject) -> dict[str, Any]:
    """Return a stage for the record, with the metric in place of the score."""
    scores = {"pruned": stage.pruned_score, "retrained": stage.score}
    return {
        "kept": stage.kept,
        "total": stage.total,
        "kept_fraction": stage.kept_fraction,
        "iterations": stage.iterations,
        **{key: None if s is None else subject.in_metric(s) for key, s in scores.items()},
        "history": [(step, subject.in_metric(score)) for step, score in stage.history],
    }
