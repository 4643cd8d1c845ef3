"""`lobs prune`: remove weights from a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs._system.run_log import phase
from lobs.cli.budgets import (
    Amount,
    AtLeastOption,
    AtMostOption,
    BytesOption,
    DropOption,
    EpsilonOption,
    FlopsOption,
    KeepOption,
    LatencyOption,
    ParametersOption,
    RelativeOption,
    ScopeOption,
    SparsityOption,
    SpeedupOption,
    scored,
)
from lobs.cli.files import default_name, distinct, file_of, output_file, outside
from lobs.cli.folders import (
    DataOption,
    FieldOption,
    LengthOption,
    SeedOption,
    WeightsOption,
    is_folder,
    refuse_data,
)
from lobs.cli.options import (
    EXPERT,
    MACHINE,
    OUTPUT,
    CodeOption,
    ForceOption,
    InputsOption,
    JsonOption,
    LayersOption,
    LogOption,
    MetricOption,
    OutOption,
    ResumeOption,
    SamplesOption,
    SkipOption,
    SolverOption,
    SubjectArgument,
    TrustOption,
)
from lobs.cli.output import announce, change, command_line, print_json, say, working
from lobs.cli.patterns import (
    AlongOption,
    BlockOption,
    PatternChoice,
    PatternOption,
    StructuredOption,
)
from lobs.errors import LobsError
from lobs.storage.outputs import PAGE, output_path, writable

if TYPE_CHECKING:
    from torch import nn

    from lobs.cli.subject import Subject
    from lobs.pruning.result import PruningResult
    from lobs.solvers.problem import Solver
    from lobs.targets import Target

SecondsOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --solver auto: longest local search in one layer.",
        metavar="S",
        rich_help_panel=EXPERT,
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Allocation rounds of a shared budget; 2 if not given.",
        metavar="N",
        rich_help_panel=EXPERT,
    ),
]
RefitOption = Annotated[
    str | None,
    typer.Option(
        help="layers; blocks: refit the kept weights of each block together; network: refit all "
        "of them at the end too. Default: network for small networks, blocks for larger ones.",
        metavar="KIND",
        rich_help_panel=EXPERT,
    ),
]
DampingOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="λ added to every moment; chosen if not given.",
        metavar="λ",
        rich_help_panel=EXPERT,
    ),
]
BatchNormOption = Annotated[
    bool,
    typer.Option(
        "--batch-norm/--no-batch-norm",
        help="Do not re-estimate batch-norm statistics.",
        rich_help_panel=EXPERT,
    ),
]
PruneBiasOption = Annotated[
    bool, typer.Option("--prune-bias", help="Biases may be removed too.", rich_help_panel=EXPERT)
]
ReportOption = Annotated[
    Path | None,
    typer.Option(help="Also write an HTML report.", metavar="FILE", rich_help_panel=OUTPUT),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the cost (time, memory, passes over the data) and stop.",
        rich_help_panel=OUTPUT,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Largest resident memory (8GB); the rest goes to files.",
        metavar="SIZE",
        rich_help_panel=MACHINE,
    ),
]
TimeOutOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Under torchrun: longest wait for a process.",
        metavar="S",
        rich_help_panel=MACHINE,
    ),
]


@dataclass(frozen=True)
class _Places:
    """The files that a run writes."""

    out: Path
    report: Path | None
    log: Path | None


def prune(
    network: SubjectArgument,
    keep: KeepOption = None,
    drop: DropOption = None,
    parameters: ParametersOption = None,
    flops: FlopsOption = None,
    size: BytesOption = None,
    speedup: SpeedupOption = None,
    latency: LatencyOption = None,
    sparsity: SparsityOption = None,
    epsilon: EpsilonOption = None,
    relative: RelativeOption = False,
    scope: ScopeOption = None,
    at_least: AtLeastOption = None,
    at_most: AtMostOption = None,
    pattern: PatternOption = None,
    along: AlongOption = None,
    block: BlockOption = None,
    structured: StructuredOption = None,
    data: DataOption = None,
    field: FieldOption = None,
    length: LengthOption = None,
    seed: SeedOption = 0,
    weights: WeightsOption = None,
    samples: SamplesOption = None,
    layers: LayersOption = None,
    skip: SkipOption = None,
    metric: MetricOption = None,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    report: ReportOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    resume: ResumeOption = None,
    memory: MemoryOption = None,
    log: LogOption = None,
    time_out: TimeOutOption = 1800,
    solver: SolverOption = "auto",
    seconds: SecondsOption = None,
    inputs: InputsOption = None,
    rounds: RoundsOption = None,
    refit: RefitOption = None,
    damping: DampingOption = None,
    batch_norm: BatchNormOption = True,
    prune_bias: PruneBiasOption = False,
) -> None:
    """Remove weights and adjust the others, so that the outputs stay close.

    Examples:
      lobs prune lenet300 --keep 7%
      lobs prune lenet5 --keep "fc1=5%,conv*=20%" --report report.html
      lobs prune mycode:network --drop 0.5% --out small.safetensors
      lobs prune mycode:network --speedup 2x
      lobs prune path/to/model --keep 50% --data text.txt --out small/
      torchrun --nproc-per-node 4 -m lobs prune mycode:network --keep 10%
    """
    amount = Amount(
        keep, drop, parameters, flops, size, sparsity, epsilon, relative, scope, at_least, at_most,
        rounds, speedup, latency,
    )  # fmt: skip
    shape = PatternChoice(pattern, along, block, structured)
    amount.check(pattern)
    target = shape.target(amount) or amount.target()
    if shape.takes_experts:
        _leave_out("--structured experts", dry_run=dry_run, memory=memory, resume=resume)
    if is_folder(network, data):
        _leave_out("a folder", dry_run=dry_run, network=code, trust=trust, metric=metric)
        _prune_folder(
            network, data, amount, target, out, shape.words(amount), weights, json,
            {"field": field, "length": length, "seed": seed, "samples": samples},
            {
                "solver": (solver, seconds), "inputs": inputs, "refit": refit, "layers": layers,
                "skip": skip, "numerics": (damping, batch_norm, prune_bias),
                "execution": (resume, memory, log),
            },
            report, time_out,
        )  # fmt: skip
        return
    refuse_data(data, network)
    places = _places(network, shape.words(amount), out, report, log, resume, force)
    announce(places.out, json or dry_run)
    numbers = {"damping": damping, "batch_norm": batch_norm, "prune_bias": prune_bias}
    machine = {"resume": resume, "memory": memory, "log": log}
    settings = {"inputs": inputs, "refit": refit, "layers": layers, "skip": skip or ()}
    with working(json):
        from lobs._system.distributed import launched_group
        from lobs.cli.subject import open_subject
        from lobs.pruning.options import Execution, Numerics

        options: dict[str, Any] = {
            **settings,
            "solver": _solver(solver, seconds),
            "numerics": Numerics(**numbers),  # type: ignore[arg-type]  # a dict of several types
            "execution": Execution(**machine, diagnostics=report is not None),  # type: ignore[arg-type]
        }
        with launched_group(time_out) as group:
            subject = open_subject(network, samples, trust=trust, network=code, metric=metric)
            target = scored(target, subject)
            if group.leads and (dry_run or (memory is not None and not json)):
                _forecast(subject, target, options, json)
            if dry_run:
                return
            before, result = _pruned(subject, target, options, group, progress=not json)
            if not group.leads:  # the first process writes for all
                return
        after = _measured(subject, result.model)
        written = _write(result, subject, solver, (before, after), places)
    if json:
        facts = {"metric": subject.metric, "before": before, "after": after}
        print_json({**facts, **result.record(), **written})
        return
    say(result.summary())
    if before is not None:
        say(change(subject.metric, before, after))
    for what, path in written.items():
        say(f"{what}: {path}")


def _leave_out(what: str, **given: Any) -> None:
    """Refuse options that do not go with something."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if named:
        raise LobsError(f"{named[0]} does not go with {what}: leave it out.")


def _prune_folder(
    network: str,
    data: Path | None,
    amount: Amount,
    target: Target,
    out: Path | None,
    words: str,
    weights: Path | None,
    json: bool,
    read: dict[str, Any],
    how: dict[str, Any],
    report: Path | None,
    time_out: float,
) -> None:
    """Prune a folder of transformers or timm."""
    from lobs.cli.folders import prune_folder

    if amount.drop is not None:
        raise LobsError("--drop needs a metric of your own: use --keep with a folder.")
    for name in ("speedup", "latency"):
        if getattr(amount, name) is not None:
            raise LobsError(
                f"--{name} shares one budget among layers in memory: use --keep with a folder."
            )
    if report is not None:
        output_path(report, PAGE)
    with working(json):
        from lobs.pruning.options import Execution, Numerics
        from lobs.zoo.hub.rows import Reading

        damping, batch_norm, prune_bias = how["numerics"]
        resume, memory, log = how["execution"]
        options: dict[str, Any] = {
            "solver": _solver(*how["solver"]),
            "numerics": Numerics(damping, batch_norm, prune_bias),
            "execution": Execution(resume=resume, memory=memory, log=log),
            "inputs": how["inputs"],
            "layers": how["layers"],
            "skip": how["skip"] or (),
        }
        if how["refit"] is not None:
            options["refit"] = how["refit"]
        reading = Reading(**read)
    prune_folder(
        network, data, amount, target, out, reading,
        words=words, weights=weights, options=options, report=report, time_out=time_out, json=json,
    )  # fmt: skip


def _places(
    network: str,
    words: str,
    out: Path | None,
    report: Path | None,
    log: Path | None,
    resume: Path | None,
    force: bool,
) -> _Places:
    """Check every file that is to be written, before any work."""
    target = output_file(out, default_name(network, words), force=force)
    if report is not None:
        output_path(report, PAGE)
    if log is not None:
        writable(log)
    source = file_of(network)
    distinct(target, "--out", source)
    distinct(report, "--report", target, source)
    distinct(log, "--log", target, report, source)
    for option, path in (("--out", target), ("--report", report), ("--log", log)):
        outside(path, option, resume)
    return _Places(target, report, log)


def _forecast(subject: Subject, target: Target, options: dict[str, Any], json: bool) -> None:
    from lobs.pruning.api import forecast

    ahead = forecast(subject.model, subject.batches, target, **options)
    print_json(ahead.as_dict()) if json else say(str(ahead))


def _pruned(
    subject: Subject, target: Target, options: dict[str, Any], group: Any, *, progress: bool
) -> tuple[float | None, PruningResult]:
    """Measure the dense network and prune it, alone or with the other processes of torchrun."""
    from dataclasses import replace

    from lobs._system.distributed import shard
    from lobs.pruning.api import prune as run
    from lobs.pruning.options import checked
    from lobs.targets import Pattern

    batches, held_out = subject.batches, subject.held_out
    if group.size > 1:
        batches = shard(batches, group)
        held_out = None if held_out is None else shard(held_out, group)
        options = {**options, "execution": replace(options["execution"], distributed=True)}
    if not (isinstance(target, Pattern) and target.takes_experts):  # which check themselves
        checked(subject.model, target, options)  # type: ignore[arg-type]  # refused before any work
    with group.raise_together():  # what evaluate raises reaches the other processes too
        before = _measured(subject, subject.model) if group.leads else None
    more = {**options, "held_out": held_out, "progress": progress}
    return before, run(subject.model, batches, target, **more)


def _measured(subject: Subject, model: nn.Module) -> float | None:
    with phase("evaluate"):
        return subject.measure(model)


def _solver(name: str, seconds: float | None) -> str | Solver:
    from lobs.solvers import Auto

    if seconds is None:
        return name
    if name != "auto":
        raise LobsError(
            f"--seconds limits the local search of --solver auto; {name} has none to limit."
        )
    return Auto(swap_seconds=seconds)


def _write(
    result: PruningResult,
    subject: Subject,
    solver: str,
    scores: tuple[float | None, float | None],
    places: _Places,
) -> dict[str, str]:
    from lobs.report import Run, write_report

    before, after = scores
    facts: dict[str, Any] = {
        "before": before,
        "after": after,
        "metric": subject.metric,
        "command": command_line(),
    }
    written = {"network": str(result.save(places.out, **subject.provenance(), **facts))}
    if places.report is not None:
        example = next(iter(subject.batches), None)
        run = Run(
            solver, result, before, after, subject.metric, dense=subject.model, example=example
        )
        written["report"] = str(
            write_report(places.report, [run], title=subject.title, command=command_line())
        )
    return written
