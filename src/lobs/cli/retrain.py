"""`lobs retrain` and `lobs iterate`: train a pruned network on with its zeros held, or prune and train in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.common import (
    JsonOption,
    SamplesOption,
    SolverOption,
    SubjectArgument,
    complement,
    distinct,
    file_of,
    notes,
    optional,
    parse_fractions,
    print_json,
    say,
    writable,
)
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.cli.subject import Subject
    from lobs.training.staged import Stage

BatchOption = Annotated[
    int | None, typer.Option(min=1, help="Images a batch; the zoo recipe's by default.")
]
RateOption = Annotated[
    float | None,
    typer.Option(min=0, help="Learning rate; the zoo recipe's original one by default."),
]
OptimizerOption = Annotated[str, typer.Option(help="sgd (Nesterov momentum, as trained) or adam.")]
DecayOption = Annotated[str, typer.Option(help="How the rate falls: constant, linear or cosine.")]
TeacherOption = Annotated[
    bool, typer.Option("--distil", help="Learn the dense network's outputs instead of labels.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the order of the data.")]


def retrain(
    file: Annotated[
        Path, typer.Argument(help="A pruned zoo network, as `lobs prune --out` writes it.")
    ],
    out: Annotated[Path, typer.Option(help="Where to save the retrained network.")],
    iterations: Annotated[int, typer.Option(min=0, help="The most to run.")] = 500,
    until_error: Annotated[
        float | None, typer.Option(help="Stop at this test error, in percent.")
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Iterations between looks at the test error.")
    ] = 50,
    batch: BatchOption = None,
    rate: RateOption = None,
    optimizer: OptimizerOption = "sgd",
    decay: DecayOption = "constant",
    distil: TeacherOption = False,
    state: Annotated[
        Path | None, typer.Option(help="File to keep the run in, to go on from if it is there.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Train a pruned network on, its zeros held exactly, and count the iterations.

    Example: `lobs retrain small.safetensors --iterations 510 --until-error 1.6 --out
    again.safetensors`
    """
    distinct(writable(out), "--out", file)
    from lobs.cli.subject import open_subject, require_file
    from lobs.storage import checkpoint
    from lobs.training.retrain import retrain as run

    require_file(file)
    saved = checkpoint.load(file)
    if not saved.masks:
        raise LobsError(
            f"'{file}' holds no masks: there are no zeros to keep. Make it with `lobs prune --out`."
        )
    _require_recipe(saved.record.get("network"), str(file))
    subject = open_subject(str(file))
    settings = _settings(subject, batch, rate, optimizer, decay, distil, seed)
    with notes():
        found = run(
            subject.model, saved.masks, settings.pop("data"), iterations=iterations, until_error=until_error, every=every,
            evaluate=subject.evaluate, checkpoint=writable(state), progress=not json, **settings,
        )  # fmt: skip
    record = {
        **saved.record,
        "retraining": {"iterations": found.iterations, "history": found.history},
        "after": found.error,
    }
    path = checkpoint.save(out, found.model, saved.masks, record)
    if json:
        print_json(
            {
                "iterations": found.iterations,
                "history": found.history,
                "reached": found.reached,
                "path": str(path),
            }
        )
        return
    first = found.history[0][1] if found.history else None
    say(
        f"{subject.metric}: {optional(first)} → {optional(found.error)} in {found.iterations} "
        f"iterations, {found.seconds:.0f} s"
    )
    say(f"network: {path}")


def prune_in_stages(
    network: SubjectArgument,
    stages: Annotated[
        str, typer.Option(help="KEEP:ITERATIONS for each stage, such as 5%:200;fc1=1%,fc*=4%:443.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to save the network of the last stage.")
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(help="layer or network, for one number; prune's default if not given."),
    ] = None,
    solver: SolverOption = "auto",
    inputs: Annotated[
        str | None, typer.Option(help="asymmetric, pruned or dense; prune's default if not given.")
    ] = None,
    samples: SamplesOption = None,
    batch: BatchOption = None,
    rate: RateOption = None,
    optimizer: OptimizerOption = "sgd",
    decay: DecayOption = "constant",
    distil: TeacherOption = False,
    keep_in: Annotated[
        Path | None, typer.Option(help="Folder for finished stages, to go on from.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Prune, retrain, prune further, retrain: as many stages as wanted.

    Examples: `lobs iterate lenet300 --stages "5%:200;1.5%:443" --distil`; as published,
    `lobs iterate lenet300 --solver lobs --inputs dense --stages
    "fc1=7%,fc2=20%,fc3=70%:300;fc1=1%,fc2=4%,fc3=54%:343"`
    """
    distinct(writable(out), "--out", file_of(network))
    plan = parse_stages(stages, scope)
    from lobs.cli.subject import open_subject
    from lobs.storage import checkpoint
    from lobs.training.staged import prune_in_stages as run

    if file_of(network) is not None:
        _require_recipe(checkpoint.load(network).record.get("network"), network)
    subject = open_subject(network, samples)
    settings = _settings(subject, batch, rate, optimizer, decay, distil, seed)
    data = settings.pop("data")
    with notes():
        done = run(
            subject.model, subject.batches, data, plan, evaluate=subject.evaluate, pruning={"solver": solver, "inputs": inputs},
            retraining=settings, folder=keep_in, progress=not json,
        )  # fmt: skip
    rows = [{**vars(stage), "kept_fraction": stage.kept_fraction} for stage in done.stages]
    path = None
    if out is not None:
        path = checkpoint.save(
            out, done.model, done.masks, {**subject.provenance(), "stages": rows}
        )
    if json:
        print_json(
            {
                "stages": rows,
                "iterations": done.iterations,
                "seconds": done.seconds,
                "path": path and str(path),
            }
        )
        return
    for index, stage in enumerate(done.stages, start=1):
        errors = f"{optional(stage.pruned_error)} after pruning, {optional(stage.error)} after {stage.iterations} iterations"
        say(
            f"stage {index}: {stage.kept:,} of {stage.total:,} kept ({stage.kept_fraction:.2%}), "
            f"{subject.metric} {errors}"
        )
    say("not saved: give --out FILE to keep the network" if path is None else f"network: {path}")


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


def _require_recipe(network: object, title: str) -> None:
    """Refuse networks that are not trained here, before their code would be run."""
    from lobs import zoo

    if network not in zoo.ZOO or zoo.ZOO[str(network)].recipe is None:
        raise LobsError(
            f"'{title}' has no labelled training data here. Use lobs.retrain, or lobs.hold in your "
            "own loop."
        )


def _settings(
    subject: Subject,
    batch: int | None,
    rate: float | None,
    optimizer: str,
    decay: str,
    distil: bool,
    seed: int,
) -> dict[str, Any]:
    """The data and the arguments of `retrain` that the options and the zoo's recipe ask for."""
    import torch

    from lobs import zoo
    from lobs.training.retrain import Shuffled, sgd
    from lobs.zoo.datasets import sets
    from lobs.zoo.datasets.labelled import LabelledImages

    _require_recipe(subject.network, subject.title)
    recipe = zoo.entry(subject.network).recipe
    assert recipe is not None
    data = sets.load(zoo.entry(subject.network).data, "train")
    assert isinstance(data, LabelledImages)
    chosen = recipe.learning_rate if rate is None else rate
    makers = {
        "sgd": sgd(chosen, recipe.momentum, recipe.weight_decay),
        "adam": lambda parameters: torch.optim.Adam(parameters, chosen),
    }
    if optimizer not in makers:
        raise LobsError(f"--optimizer {optimizer}: use sgd or adam.")
    return {
        "data": Shuffled(data.images, data.labels, batch or recipe.batch_size),
        "optimizer": makers[optimizer],
        "decay": decay,
        "teacher": zoo.trained(subject.network) if distil else None,
        "seed": seed,
    }
