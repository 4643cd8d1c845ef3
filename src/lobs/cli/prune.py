"""`lobs prune`: the work itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.budgets import (
    AtLeastOption,
    AtMostOption,
    BytesOption,
    FlopsOption,
    LargerOption,
    MaxDropOption,
    ParametersOption,
    budget_target,
    in_the_metric,
    limits,
    score_of,
)
from lobs.cli.common import (
    JsonOption,
    LayersOption,
    SamplesOption,
    SkipOption,
    SolverOption,
    SubjectArgument,
    TrustOption,
    command_line,
    complement,
    distinct,
    file_of,
    notes,
    optional,
    parse_fractions,
    print_json,
    require_one,
    say,
    writable,
)
from lobs.cli.patterns import (
    AlongOption,
    BlockOption,
    PatternOption,
    StructuredOption,
    pattern_target,
)
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.solvers.problem import Solver
    from lobs.targets import Target


def prune(
    network: SubjectArgument,
    keep: Annotated[
        str | None, typer.Option(help="Fraction kept: 0.07, 7%, or fc1=6.7%,fc2=20%,fc*=0.5.")
    ] = None,
    sparsity: Annotated[
        str | None, typer.Option(help="Fraction removed, in the same forms.")
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option(help="Largest layer error √E allowed, in the same forms.")
    ] = None,
    relative: Annotated[
        bool, typer.Option("--relative", help="ε is relative to the layer's output norm.")
    ] = False,
    parameters: ParametersOption = None,
    flops: FlopsOption = None,
    size: BytesOption = None,
    drop: MaxDropOption = None,
    larger_is_better: LargerOption = False,
    at_least: AtLeastOption = None,
    at_most: AtMostOption = None,
    scope: Annotated[
        str | None,
        typer.Option(
            help="layer: the fraction of each; network: of all, shared where it costs least, as is one number by default."
        ),
    ] = None,
    pattern: PatternOption = None,
    along: AlongOption = None,
    block: BlockOption = None,
    structured: StructuredOption = None,
    solver: SolverOption = "auto",
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --solver auto: stop exchanging weights in a layer after so long."
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="asymmetric: layers see what pruned layers before them give and mend it; pruned: they see it; dense: they "
            "do not. asymmetric by default, dense with --epsilon."
        ),
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often a budget for the whole network is shared out; twice by default."
        ),
    ] = None,
    samples: SamplesOption = None,
    layers: LayersOption = None,
    skip: SkipOption = None,
    prune_bias: Annotated[
        bool, typer.Option("--prune-bias", help="Let biases be removed too.")
    ] = False,
    damping: Annotated[
        float | None, typer.Option(min=0, help="λ added to every Ψ; chosen by default.")
    ] = None,
    batch_norm: Annotated[
        bool, typer.Option(help="Re-estimate batch norms' statistics, where that helps.")
    ] = True,
    compensate: Annotated[
        str | None,
        typer.Option(
            help="network: in the end all surviving weights move together, to where the output is nearest to the dense one's; "
            "layers: they do not. By default network where that takes some twenty seconds at most."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to save the pruned network (safetensors).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write the HTML report.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps finished work: the same command again goes on where a killed one was."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Most resident memory, such as 8GB: what does not fit is done in parts or goes to temporary files."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what it would take: passes over the data, bytes, about how long.",
        ),
    ] = False,
    log_json: Annotated[
        Path | None,
        typer.Option(
            "--log-json",
            help="Add a JSON line to this file whenever a piece of work begins or ends.",
        ),
    ] = None,
    time_out: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds after which processes started by torchrun give up on a silent one."
        ),
    ] = 1800,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Prune a network: a zoo's, a checkpoint's, or your own from package.module:function.

    Examples: `lobs prune lenet300 --keep fc1=6.7%,fc2=20%,fc3=65% --out small.safetensors --report
    report.html`; `lobs prune mycode:network --epsilon 0.1 --relative`; `torchrun --nproc-per-node 4
    -m lobs prune mycode:network --keep 10% --resume folder --out small.safetensors`
    """
    require_one(
        keep=keep, sparsity=sparsity, epsilon=epsilon, pattern=pattern,
        parameters=parameters, flops=flops, bytes=size, drop=drop,
    )  # fmt: skip
    if relative and epsilon is None:
        raise LobsError("--relative goes with --epsilon.")
    shaped = pattern_target(pattern, along, block, structured, keep, sparsity, scope)
    kept_limits = limits(at_least, at_most)
    if shaped is not None and kept_limits:
        raise LobsError(
            "--at-least and --at-most go with a budget for the whole network, not with a pattern."
        )
    budget = budget_target(parameters, flops, size, drop, scope, kept_limits)
    target = shaped or budget or _target(keep, sparsity, epsilon, relative, scope, kept_limits)
    writable(out)
    writable(report)
    writable(log_json)
    distinct(out, "--out", file_of(network))
    distinct(report, "--report", out, file_of(network))
    distinct(log_json, "--log-json", out, report, file_of(network))

    from lobs._system.distributed import launched_group, shard
    from lobs.cli.subject import open_subject
    from lobs.pruning.api import forecast
    from lobs.pruning.api import prune as run
    from lobs.pruning.options import PASSES, check, shared

    chosen = _solver(solver, seconds)
    if passes is not None and (drop is not None or not shared(target)):
        raise LobsError(
            "--passes goes with a budget that the layers share: one number, --parameters, --flops "
            "or --bytes."
        )
    passes = passes or PASSES
    with launched_group(time_out) as group, notes():
        subject = open_subject(network, samples, trust=trust)
        if group.leads and (dry_run or (memory is not None and not json)):
            choices: dict[str, Any] = {
                "solver": chosen,
                "inputs": inputs,
                "layers": layers,
                "skip": skip or (),
                "passes": passes,
                "prune_bias": prune_bias,
                "damping": damping,
                "batch_norm": batch_norm,
                "compensate": compensate,
            }
            ahead = forecast(subject.model, subject.batches, target, memory=memory, **choices)
            print_json(ahead.as_dict()) if json else say(str(ahead))
        if dry_run:
            return
        check(
            subject.model,
            target,
            inputs=inputs,
            layers=layers,
            skip=skip or (),
            prune_bias=prune_bias,
        )  # type: ignore[arg-type]
        before = subject.score(subject.model) if group.leads else None
        alone = group.size == 1
        result = run(
            subject.model,
            subject.batches if alone else shard(subject.batches, group),
            target,
            solver=chosen,
            inputs=inputs,  # type: ignore[arg-type]  # checked by prune, with the choices in its message
            layers=layers,
            skip=skip or (),
            progress=not json,
            distributed=not alone,
            prune_bias=prune_bias,
            damping=damping,
            batch_norm=batch_norm,
            refit=compensate,  # type: ignore[arg-type]  # likewise
            diagnostics=report is not None,
            held_out=subject.held_out
            if alone or subject.held_out is None
            else shard(subject.held_out, group),
            evaluate=score_of(subject, drop, larger_is_better),
            passes=passes,
            resume=resume,
            log_json=log_json,
            memory=memory,
        )
        if not group.leads:  # the first process writes and speaks for all
            return
    in_the_metric(result.settings, larger_is_better)
    after = subject.score(result.model)
    written = _write(result, subject, solver, before, after, out, report)
    if json:
        print_json(
            {
                "metric": subject.metric,
                "before": before,
                "after": after,
                **result.record(),
                **written,
            }
        )
        return
    say(result.summary())
    if before is not None:
        say(f"{subject.metric}: {optional(before)} → {optional(after)}")
    for what, path in written.items():
        say(f"{what}: {path}")
    if out is None:
        say("not saved: give --out FILE to keep the pruned network")


def _target(
    keep: str | None,
    sparsity: str | None,
    epsilon: str | None,
    relative: bool,
    scope: str | None,
    limits: dict[str, dict[str, float]],
) -> Target:
    from lobs.errors import TargetError
    from lobs.targets import ErrorBudget, Sparsity

    if epsilon is not None:
        if limits:
            raise TargetError(
                "--at-least and --at-most go with a budget for the whole network; ε is each "
                "layer's own."
            )
        if scope == "network":
            raise TargetError("--scope goes with --keep or --sparsity; ε is each layer's own.")
        return ErrorBudget(parse_fractions(epsilon, "--epsilon"), relative=relative)
    if keep is not None:
        fraction = complement(parse_fractions(keep, "--keep"))
    else:
        fraction = parse_fractions(sparsity or "", "--sparsity")
    return Sparsity(fraction, scope=scope, **limits)  # type: ignore[arg-type]  # checked there, with the choices in its message


def _solver(name: str, seconds: float | None) -> str | Solver:
    from lobs.solvers import Auto

    if seconds is None:
        return name
    if name != "auto":
        raise LobsError(
            f"--seconds goes with --solver auto, whose exchange of weights it limits; {name} has "
            "none to limit."
        )
    return Auto(swap_seconds=seconds)


def _write(
    result: Any,
    subject: Any,
    solver: str,
    before: float | None,
    after: float | None,
    out: Path | None,
    report: Path | None,
) -> dict[str, str]:
    from lobs.report import Run, write_report

    written = {}
    if out is not None:
        facts = {
            "before": before,
            "after": after,
            "metric": subject.metric,
            "command": command_line(),
        }
        written["network"] = str(result.save(out, **subject.provenance(), **facts))
    if report is not None:
        example = next(iter(subject.batches), None)
        run = Run(
            solver, result, before, after, subject.metric, dense=subject.model, example=example
        )
        written["report"] = str(
            write_report(report, [run], title=subject.title, command=command_line())
        )
    return written
