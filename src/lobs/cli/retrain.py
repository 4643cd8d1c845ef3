"""`lobs retrain`: train a pruned network further while its zeros stay zero."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.files import default_name, distinct, makeable, output_file
from lobs.cli.options import (
    MACHINE,
    TRAINING,
    CodeOption,
    ForceOption,
    JsonOption,
    MetricOption,
    OutOption,
    TrustOption,
    complete_file,
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
from lobs.errors import LobsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lobs.cli.subject import Subject
    from lobs.training.retrain import Retraining


def retrain(
    file: Annotated[
        Path,
        typer.Argument(
            help="A pruned network, as lobs prune writes it.",
            metavar="FILE",
            autocompletion=complete_file,
        ),
    ],
    iterations: Annotated[
        int,
        typer.Option(min=0, help="Largest number of steps.", metavar="N", rich_help_panel=TRAINING),
    ] = 500,
    until: Annotated[
        float | None,
        typer.Option(
            help="Stop when the metric is this good: a test error in percent for the zoo.",
            metavar="VALUE",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            min=1, help="Steps between measurements.", metavar="N", rich_help_panel=TRAINING
        ),
    ] = 50,
    batch: BatchOption = None,
    rate: RateOption = None,
    optimizer: OptimizerOption = "sgd",
    decay: DecayOption = "constant",
    distil: DistilOption = False,
    seed: SeedOption = 0,
    metric: MetricOption = None,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the run. The same command continues from there.",
            metavar="FOLDER",
            rich_help_panel=MACHINE,
        ),
    ] = None,
) -> None:
    """Train a pruned network further. Its zeros stay exactly zero.

    Your own network needs batches of (input, label), or --distil.

    Examples:
      lobs retrain small.safetensors --iterations 510 --until 1.6
      lobs retrain own.safetensors --network mycode:network --distil
    """
    from lobs.cli.subject import open_subject, require_file
    from lobs.storage import checkpoint

    require_file(file)
    target = output_file(out, default_name(str(file), "retrained"), force=force)
    distinct(target, "--out", file)
    if resume is not None:
        makeable(resume)
    announce(target, json)
    saved = checkpoint.load(file)
    if not saved.masks:
        raise LobsError(
            f"'{file}' holds no masks: there are no zeros to keep. Make it with `lobs prune --out`."
        )
    subject = open_subject(str(file), trust=trust, network=code, metric=metric)
    training = Training(batch, rate, optimizer, decay, distil, seed)
    settings = training.settings(subject)
    if until is not None:
        subject.require_metric("--until")
    with working(json):
        found = _run(subject, saved.masks, settings, (iterations, every, until), resume, not json)
    history = [(step, subject.in_metric(score)) for step, score in found.history]
    after = history[-1][1] if history else None
    retraining = {"iterations": found.iterations, "history": history}
    record = {**saved.record, "network": subject.network, "retraining": retraining, "after": after}
    path = checkpoint.save(found.model, target, saved.masks, record)
    if json:
        print_json({**retraining, "reached": found.reached, "path": str(path)})
        return
    first = history[0][1] if history else None
    say(
        f"{subject.metric}: {optional(first)} → {optional(after)} in {found.iterations} "
        f"iterations, {found.seconds:.0f} s"
    )
    say(f"network: {path}")


def _run(
    subject: Subject,
    masks: Mapping[str, Tensor],
    settings: dict[str, Any],
    steps: tuple[int, int, float | None],
    resume: Path | None,
    progress: bool,
) -> Retraining:
    from lobs.pruning.options import Execution
    from lobs.training.retrain import retrain as run

    iterations, every, until = steps
    arguments = dict(settings)
    return run(
        subject.model,
        masks,
        arguments.pop("data"),
        iterations=iterations,
        every=every,
        evaluate=subject.evaluate and subject.score,
        until_score=None if until is None else subject.as_score(until),
        execution=Execution(resume=resume),
        progress=progress,
        **arguments,
    )
