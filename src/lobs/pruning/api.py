"""`prune`: a network, batches and a target become a pruned network."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from lobs.pruning.options import PASSES, check, compensation, shared
from lobs.calibration.batches import guarded
from lobs.pruning.refit.joint import Compensate
from lobs._system.distributed import find_group, use_group
from lobs.errors import LobsError, caution, saying_once
from lobs.pruning.forecast import Forecast, taken_in_the_end
from lobs.pruning.forecast import forecast as _forecast
from lobs.pruning.session import Inputs, Job
from lobs.storage.run_store import fingerprint, open_run_store
from lobs.layers import Layer
from lobs._system.memory import limited, parse
from lobs._system.run_log import log_event, peak_bytes, recorded_run
from lobs.pruning.run import run
from lobs.solvers.problem import Solver
from lobs._system.progress import shown
from lobs.pruning.result import PruningResult
from lobs.solvers.solution import Solution
from lobs.solvers import as_solver
from lobs.targets import Budget, Pattern, Target
from lobs.pruning.drop_search import LOOKS, Evaluate, Trial, search


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target | float,
    *,
    solver: str | Solver = "auto",
    inputs: Inputs | None = None,
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    inplace: bool = False,
    progress: bool = True,
    prune_bias: bool = False,
    damping: float | None = None,
    diagnostics: bool = False,
    held_out: Iterable[Any] | None = None,
    evaluate: Evaluate | None = None,
    passes: int = PASSES,
    batch_norm: bool = True,
    compensate: Compensate | None = None,
    resume: str | os.PathLike[str] | None = None,
    distributed: bool = False,
    log_json: str | os.PathLike[str] | None = None,
    memory: str | float | None = None,
) -> PruningResult:
    """Remove weights from a trained network and move the rest to compensate.

    Args:
        model: a trained network; untouched unless `inplace`, and then written only after everything
            has succeeded.
        batches: unlabelled inputs, a few hundred or more: an iterable of tensors, of tuples whose
            first item is the input, or of mappings of keyword arguments. They are run several
            times; a generator is read into a list first.
        target: `Sparsity`, `Budget`, `ErrorBudget`, `NByM`, `Block`, `Structured`, or a number for
            the fraction removed from the network as a whole.
        solver: a name from `SOLVERS`, or a solver.
        inputs: "asymmetric": layers are pruned in the order they run; each sees what the pruned
            layers before it give and must reproduce what the dense network gives there, so that it
            mends what they spoiled. "pruned": the same inputs, but only the layer's own dense
            weights to reproduce. "dense": every layer sees what the dense network feeds it; one
            pass over the data for all moments. By default "asymmetric", but "dense" for an
            `ErrorBudget`, which speaks of each layer by itself.
        layers: names or globs of the layers to prune; all of the kinds that `lobs` knows by
            default.
        skip: names or globs of layers to leave alone.
        inplace: write into `model` itself instead of a copy.
        progress: draw progress bars on a terminal for what takes over two seconds.
        prune_bias: let biases be removed too, and count them.
        damping: λ added to every Ψ's diagonal; chosen, and reported, by default.
        diagnostics: also record the distribution of sensitivities, for the report.
        held_out: other inputs, to measure on them too how far the output moved.
        evaluate: the score that `Budget(drop=…)` is about, larger is better.
        passes: how often a network-wide budget is shared out: the second time by how the network
            pruned the first time, not the dense one, answers to its units. 1 takes half the time.
            Trials of `drop` share it out once each.
        batch_norm: re-estimate batch norms' statistics on `batches`, where that brings the output
            nearer to the dense one, by a hundredth at least.
        compensate: "layers": surviving weights take the values that are best for their own layer.
            "network": in the end all of them move together to where the network's output is nearest
            to the dense one's, on `batches` and with no labels; needs asymmetric inputs. By default
            "network" with the default solver on networks so small that this takes about twenty
            seconds at most. An eighth of them is kept back, and where nothing is won there the
            weights stay.
        resume: a folder in which every finished piece of work is kept; if it holds an interrupted
            run of the same network, data and settings, that is taken up and ends with the same
            bits. The batches must come in the same order each time.
        distributed: share the work with the other processes of torch.distributed's process group,
            all of which call this with the same network and settings and each with its own batches,
            or none. All get the same result; the first one writes.
        log_json: a file to which a JSON line is added whenever a piece of work begins or ends, with
            its time and the memory.
        memory: how much resident memory this process may take in all, such as "8GB": layers are
            calibrated in groups that fit, what does not fit goes to temporary files, wide layers
            are kept in single precision. `lobs.forecast` says beforehand what that means.

    Returns:
        A `PruningResult`: `.model`, `.masks`, `.layers`, `.certificate`, `.summary()`,
            `.save(path)`.
    """
    began = time.perf_counter()
    wanted, inputs, found = check(
        model,
        target,
        inputs=inputs,
        layers=layers,
        skip=skip,
        passes=passes,
        prune_bias=prune_bias,
        damping=damping,
    )
    if isinstance(wanted, Budget) and wanted.drop is not None and evaluate is None:
        raise LobsError(
            "Budget(drop=…) needs evaluate=…: a function of a network that returns its score, "
            "larger is better."
        )
    if evaluate is not None and not callable(evaluate):
        raise LobsError(
            f"evaluate is {evaluate!r}: give a function of a network that returns its score, "
            "larger is better."
        )
    for switch, value in {"batch_norm": batch_norm, "inplace": inplace}.items():
        if not isinstance(value, bool):
            raise LobsError(f"{switch} is {value!r}: True or False.")
    data = guarded(batches)
    held_out = None if held_out is None else guarded(held_out, again=False, name="held_out")
    chosen = as_solver(solver)
    how, work = compensation(compensate, chosen, inputs, memory)
    settings = {
        "target": wanted, "solver": chosen, "inputs": inputs, "layers": [layer.name for layer in found], "passes": passes,
        "prune_bias": prune_bias, "damping": damping, "diagnostics": diagnostics, "batch_norm": batch_norm,
        "compensate": (how, work),
    }  # fmt: skip
    group = find_group(distributed)
    log = log_json if group.leads else None
    limit = None if memory is None else parse(memory)
    if limit is not None:
        settings["memory"] = limit
    with (
        saying_once(),
        limited(limit, 0 if limit is None else taken_in_the_end(model, found)),
        shown(progress and group.leads),
        use_group(group),
        recorded_run(log) as run_log,
        ExitStack() as stack,
    ):
        settings["processes"] = group.size
        identity = (
            fingerprint(model, data, settings) if resume is not None or group.size > 1 else {}
        )
        run_store = stack.enter_context(open_run_store(resume, identity))
        room = None
        if limit is not None:
            options = _forecast_options(wanted, passes, damping, batch_norm)
            ahead = _forecast(model, data, found, chosen, inputs=inputs, **options)
            log_event("forecast", **ahead.as_dict())
            room = ahead.room
        # Where no budget is shared out by the dense network's error curves, its moments may never
        # be wanted.
        gather = limit is not None or not (inputs == "dense" or shared(wanted))
        job = Job(model, data, found, chosen, inputs, prune_bias, damping, diagnostics, batch_norm, run_store, gather, room,
                  how, work)  # fmt: skip
        calibration = job.calibration
        calibrated = time.perf_counter() - began
        trials: list[Trial] = []
        if isinstance(wanted, Budget) and wanted.drop is not None:
            assert evaluate is not None
            outcome, trials = search(job, wanted, wanted.drop, evaluate)
        else:
            rounds = passes if shared(wanted) else 1
            outcome = run(job, job.plan(wanted), last=rounds == 1)
            for later in range(2, rounds + 1):
                job.look_again(outcome.model)
                outcome = run(job, job.plan(wanted), last=later == rounds)
        certificate = outcome.certify(held_out)
        preview = job.preview(
            {name: solution.removed for name, solution in outcome.solutions.items()}
        )
    if not (prune_bias or trials or isinstance(wanted, Pattern)):
        _warn_of_zeros(found, outcome.solutions)
    if inplace:
        _write_back(outcome.model, model)
    said: dict[str, Any] = {
        "target": repr(wanted),
        "solver": repr(job.solver),
        "inputs": inputs,
        "samples": calibration.samples,
        "calibration seconds": round(calibrated, 2),
    }
    if shared(wanted) and not trials:  # which share it out once each
        said["passes"] = passes
    if damping is not None:
        said["damping"] = damping
    if prune_bias:
        said["biases"] = "may be removed"
    if outcome.norms is not None:
        said["batch norm"] = str(outcome.norms)
    elif not batch_norm:
        said["batch norm"] = "not re-estimated"
    if outcome.compensation is not None:
        if compensate == "network" and outcome.compensation.reason:
            caution(f"refit='network': weights were left {outcome.compensation}.")
        said["compensation"] = str(outcome.compensation)
    if evaluate is not None and not trials:
        said["evaluate"] = "not called: it is the score that Budget(drop=…) is about"
    if trials:
        said["trials"] = [asdict(trial) for trial in trials]
    return PruningResult(
        model=model if inplace else outcome.model,
        masks=outcome.masks,
        layers=tuple(outcome.results[layer.name] for layer in found),
        certificate=certificate,
        solutions=outcome.solutions,
        settings=said,
        seconds=time.perf_counter() - began,
        batch_norm=outcome.norms,
        preview=preview,
        phases=run_log.seconds,
        peak_bytes=peak_bytes(),
    )


def forecast(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target | float,
    *,
    solver: str | Solver = "auto",
    inputs: Inputs | None = None,
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    passes: int = PASSES,
    prune_bias: bool = False,
    damping: float | None = None,
    batch_norm: bool = True,
    compensate: Compensate | None = None,
    memory: str | float | None = None,
) -> Forecast:
    """What `prune` with these arguments would take: passes over the data, bytes, about how many seconds.

    Runs the network on one batch. With a limit of `memory` that cannot be kept it raises as `prune`
    would, and says what can.
    """
    wanted, inputs, found = check(
        model,
        target,
        inputs=inputs,
        layers=layers,
        skip=skip,
        passes=passes,
        prune_bias=prune_bias,
        damping=damping,
    )
    data = guarded(batches)
    chosen = as_solver(solver)
    with limited(None if memory is None else parse(memory), taken_in_the_end(model, found)):
        options = _forecast_options(wanted, passes, damping, batch_norm)
        options["compensation"] = compensation(compensate, chosen, inputs, memory)
        return _forecast(model, data, found, chosen, inputs=inputs, **options)


def _forecast_options(
    wanted: Target, passes: int, damping: float | None, batch_norm: bool
) -> dict[str, Any]:
    """What a forecast must know beside the network and the data."""
    options = {
        "shared": shared(wanted),
        "rounds": passes,
        "damped": damping is not None,
        "target": wanted,
        "batch_norm": batch_norm,
    }
    if isinstance(wanted, Budget) and wanted.drop is not None:
        # At its longest: no trial is good enough, and what the limits force is pruned after all of
        # them.
        return {**options, "rounds": LOOKS + 1, "looks": 1}
    return options


def _warn_of_zeros(layers: list[Layer], solutions: Mapping[str, Solution]) -> None:
    """Say so where layers were all sparser than is asked of them."""
    pairs = [
        (int((layer.weight != 0).sum()), solutions[layer.name].kept)
        for layer in layers
        if layer.name in solutions
    ]
    there, kept = (sum(numbers) for numbers in zip(*pairs, strict=True)) if pairs else (0, 0)
    if all(had <= left for had, left in pairs) and there < kept < sum(
        layer.weight.numel() for layer in layers
    ):
        caution(
            f"these layers had {there:,} weights other than zero, and {kept:,} are kept: ask for "
            "fewer than they had."
        )


def _write_back(pruned: nn.Module, model: nn.Module) -> None:
    """Give a network the pruned one's numbers: all of them, or, whatever interrupts, none."""
    new, old = pruned.state_dict(), model.state_dict()
    changed = {
        name: t
        for name, t in new.items()
        if isinstance(t, torch.Tensor) and not torch.equal(t, old[name])
    }
    before = {name: old[name].clone() for name in changed}
    with torch.no_grad():
        try:
            for name, tensor in changed.items():
                old[name].copy_(tensor)
        except BaseException as error:
            for name, tensor in before.items():
                with suppress(RuntimeError):  # what could not be written has not changed
                    old[name].copy_(tensor)
            if isinstance(error, RuntimeError):
                raise LobsError(
                    f"the network cannot be written in place: {error} Use inplace=False."
                ) from error
            raise
