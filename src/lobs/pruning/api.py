"""`prune`: a network, batches and a target become a pruned network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from lobs._system.context import alone
from lobs._system.distributed import find_group, process_group, use_group
from lobs._system.memory import limited
from lobs._system.progress import shown
from lobs._system.run_log import RunLog, log_event, peak_bytes, recorded_run
from lobs.calibration.batches import Batches
from lobs.calibration.forward import fitted
from lobs.calibration.kept_back import BOTH, CHOICE, KEPT_BACK, divided
from lobs.errors import LobsError, caution, warning_once
from lobs.layers.discovery import is_parametrised
from lobs.layers.folding import folded
from lobs.layers.hooks import nothing_left
from lobs.layers.untouched import buffers_kept
from lobs.pruning.drop_search import TRIALS, Trial, search_drop
from lobs.pruning.experts import prune_experts
from lobs.pruning.feasibility import empty_target, header_bytes, header_room, warn_of
from lobs.pruning.forecast import Forecast, Workload, taken_in_the_end
from lobs.pruning.forecast import forecast as _forecast
from lobs.pruning.options import Options, PruneOptions, check_model, checked
from lobs.pruning.refit.blocks import BlockRefits
from lobs.pruning.result import PruningResult
from lobs.pruning.run import Run, run_rounds
from lobs.pruning.session import Session
from lobs.solvers.solution import Solution
from lobs.storage.run_store import fingerprint, open_run_store
from lobs.targets import Budget, Pattern, Target, wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target | None = None,
    *,
    keep: float | str | Mapping[str, float | str] | None = None,
    held_out: Iterable[Any] | None = None,
    inplace: bool = False,
    progress: bool = True,
    **options: Unpack[PruneOptions],
) -> PruningResult:
    """Remove weights from a trained network and move the others to compensate.

    Args:
        model: a trained network. It is not changed unless `inplace`, and then only at the end.
        batches: a few hundred unlabelled inputs or more: an iterable of tensors, of tuples whose
            first item is the input, or of mappings of keyword arguments. They are read several
            times; a generator is read into a list first.
        target: `Sparsity`, `Budget`, `ErrorBudget`, `NByM`, `Block` or `Structured`.
        keep: the fraction to keep, in place of a target: 0.1, "10%", or a mapping by layer.
        held_out: other inputs, to measure the change of the output on them too.
        inplace: write into `model` itself instead of a copy.
        progress: show progress on anything that takes over two seconds.
        **options: `solver`, `inputs`, `refit`, `layers`, `skip`, `numerics`, `execution`, which
            `lobs.pruning.options.PruneOptions` explains.

    Returns:
        A `PruningResult`: `.model`, `.masks`, `.layers`, `.certificate`, `.summary()`, `.save()`.
    """
    began = time.perf_counter()
    dense = _plain(model, options, inplace)
    data = fitted(dense, batches)
    if _asks_for_experts(target, keep, inplace):
        return prune_experts(dense, data, target, options, held_out=held_out, progress=progress)
    asked = checked(dense, target, options, keep, data)
    other = None if held_out is None else fitted(dense, held_out, again=False, name="held_out")
    data, choosing, other, kept_for = _kept_back(asked, data, other)
    with _prepared(dense, asked, progress) as log, _opened(dense, data, asked) as session:
        session.choosing = choosing
        asked, calibrated = session.options, time.perf_counter() - began
        run, trials = _pruned(session)
        certificate, preview = run.certify(other), session.preview(run.removed())
        layers, solutions = run.results(), run.solutions()
    _check_left(asked, solutions, trials)
    if inplace:
        _write_back(run.model, model)
    return PruningResult(
        model=model if inplace else run.model,
        masks=run.masks,
        layers=layers,
        certificate=certificate,
        solutions=solutions,
        settings=_settings(session, run, trials, calibrated) | kept_for,
        seconds=time.perf_counter() - began,
        batch_norm=run.norms,
        preview=preview,
        phases=log.seconds,
        peak_bytes=peak_bytes(),
        coverage=session.coverage,
    )


def _plain(model: nn.Module, options: PruneOptions, inplace: bool) -> nn.Module:
    """Return the network, or a copy whose parametrised weights are plain ones."""
    if not isinstance(inplace, bool):
        raise LobsError(f"inplace is {inplace!r}: True or False.")
    check_model(model)
    if not any(map(is_parametrised, model.modules())):
        return model
    dense = folded(model, options.get("layers"), options.get("skip", ()))
    _refuse_in_place(
        inplace and dense is not model, "parametrised weights cannot be written in place"
    )
    return dense


def _asks_for_experts(target: Target | None, keep: Any, inplace: bool) -> TypeGuard[Pattern]:
    if not (isinstance(target, Pattern) and target.takes_experts):
        return False
    wanted(target, keep)  # which refuses both
    _refuse_in_place(inplace, "a network with fewer experts is smaller and cannot be written back")
    return True


def _refuse_in_place(asked: bool, reason: str) -> None:
    if asked:
        raise LobsError(f"{reason}: use inplace=False.")


def _pruned(session: Session) -> tuple[Run, list[Trial]]:
    """Return the last run of a session, and the trials where a drop was searched for."""
    target = session.options.target
    if isinstance(target, Budget) and target.drop is not None:
        return search_drop(session)
    return run_rounds(session), []


def _kept_back(
    asked: Options, data: Batches, other: Batches | None
) -> tuple[Batches, Batches | None, Batches | None, dict[str, str]]:
    """Return the inputs that prune, choose and certify, and what some were kept back for."""
    if not (isinstance(asked.target, Budget) and asked.target.label_free):
        return data, None, other, {}
    pruning, choosing, certifying = divided(data, certify=other is None)
    if other is not None:
        return pruning, choosing, other, {KEPT_BACK: CHOICE}
    return pruning, choosing, certifying, {KEPT_BACK: BOTH}


def forecast(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target | None = None,
    *,
    keep: float | str | Mapping[str, float | str] | None = None,
    **options: Unpack[PruneOptions],
) -> Forecast:
    """Predict what `prune` with these arguments would take: passes, bytes, seconds.

    It runs the network on one batch. A memory limit that cannot be kept raises as `prune` would.

    Args:
        model: the network.
        batches: the calibration data.
        target: as for `prune`.
        keep: as for `prune`.
        **options: as for `prune`.
    """
    model = _plain(model, options, False)
    data = fitted(model, batches)
    asked = checked(model, target, options, keep, data)
    limit = asked.execution.memory_bytes
    group = find_group(asked.execution.distributed)
    with alone(), limited(limit, taken_in_the_end(model, list(asked.layers))), use_group(group):
        return _forecasted(model, data, asked)


@contextmanager
def _prepared(model: nn.Module, asked: Options, progress: bool) -> Iterator[RunLog]:
    """Set up memory limit, process group, progress and log; yield the log."""
    group = find_group(asked.execution.distributed)
    limit = asked.execution.memory_bytes
    taken = 0 if limit is None else taken_in_the_end(model, list(asked.layers))
    with (
        alone(),
        nothing_left(model),
        warning_once(),
        buffers_kept(model),
        torch.inference_mode(False),  # whose tensors can neither be written nor differentiated
        limited(limit, taken),
        shown(progress and group.leads, steps=_steps(asked), layers=_costs(asked)),
        use_group(group),
        recorded_run(asked.execution.log if group.leads else None) as log,
    ):
        yield log


def _steps(asked: Options) -> list[str]:
    """Return the steps of the run in the words that the progress display shows."""
    rounds = ["allocate", "prune"] * asked.rounds if asked.shared else ["prune"]
    refit = ["refit"] if asked.refit in (None, "network") else []
    return ["calibrate", *rounds, *refit, "measure"]


def _costs(asked: Options) -> dict[str, float]:
    """Return about how dear each layer is, in multiply-adds of one pass over its moment."""
    return {layer.name: layer.weight.numel() * float(layer.columns) for layer in asked.layers}


@contextmanager
def _opened(model: nn.Module, data: Batches, asked: Options) -> Iterator[Session]:
    """Open the run store, where one is wanted, and yield the session."""
    resume, group = asked.execution.resume, process_group()
    identity = {}
    if resume is not None or group.size > 1:
        identity = fingerprint(model, data, asked.identity() | {"processes": group.size})
    with open_run_store(resume, identity) as store:
        session = Session(model, data, asked, store)
        if asked.execution.memory is not None:
            ahead = _forecasted(model, data, asked)
            log_event("forecast", **ahead.as_dict())
            session.pass_bytes = ahead.room
        session.leave_unreached()
        warn_of(session.coverage)
        yield session


def _forecasted(model: nn.Module, data: Batches, asked: Options) -> Forecast:
    rounds, looks = asked.rounds, None
    if isinstance(asked.target, Budget) and asked.target.drop is not None:
        # At worst no trial passes, and one more run follows them.
        rounds, looks = TRIALS + 1, 1
    return _forecast(
        model,
        data,
        list(asked.layers),
        asked.solver,
        Workload(
            target=asked.target,
            inputs=asked.inputs,
            shared=asked.shared,
            rounds=rounds,
            looks=looks,
            damped=asked.numerics.damping is not None,
            batch_norm=asked.numerics.batch_norm,
            refit=asked.refit,
            refit_work=asked.refit_work,
        ),
    )


def _settings(session: Session, run: Run, trials: list[Trial], calibrated: float) -> dict[str, Any]:
    """Return what the result says of how it was made.

    Args:
        session: what the runs shared.
        run: the last run.
        trials: the trials of a search for a drop.
        calibrated: seconds until the calibration was done.
    """
    asked = session.options
    numerics = asked.numerics
    settings: dict[str, Any] = {
        "samples": session.calibration.samples,
        "measured samples": run.compare().samples,
        "measured every": run.measured_every,
        "calibration seconds": round(calibrated, 2),
        "target": repr(asked.target),
        "solver": repr(asked.solver),
        "inputs": asked.inputs,
    }
    if asked.shared and not trials:
        settings["rounds"] = asked.rounds
    if numerics.damping is not None:
        settings["damping"] = numerics.damping
    if numerics.prune_bias:
        settings["biases"] = "may be removed"
    if run.norms is not None:
        settings["batch norm"] = str(run.norms)
    elif not numerics.batch_norm:
        settings["batch norm"] = "not re-estimated"
    if run.refit is not None:
        if asked.refit is not None and run.refit.reason:
            caution(f"refit='{asked.refit}': weights were left {run.refit}.")
        settings["refit"] = str(run.refit)
    rare = run.rarely_used()
    if rare:
        settings["rarely used"] = rare
    if isinstance(run.refit, BlockRefits):
        settings["blocks"] = [asdict(block) for block in run.refit.blocks]
    if run.session.timing is not None:
        settings["time"] = run.session.timing.measured(run.model)
    if trials:
        settings["trials"] = [asdict(trial) for trial in trials]
    return settings | _reservations(session, run)


def _reservations(session: Session, run: Run) -> dict[str, Any]:
    """Return where a number that was asked for means less than it seems to."""
    found: dict[str, Any] = {}
    target, layers = session.options.target, session.layers
    if isinstance(target, Budget) and target.bytes is not None:
        counts = session.prunable
        if header_room(target.bytes, session.model, layers, target, counts):
            found["file bytes"] = target.bytes
        else:
            found["header"] = header_bytes(session.model, layers, counts)
    tensors = run.model.state_dict()
    lost = {
        name: count
        for name, mask in run.masks.items()
        if tensors[name].itemsize < 4 and (count := int((mask & (tensors[name] == 0)).sum()))
    }
    return found | ({"underflow": lost} if lost else {})


def _check_left(asked: Options, solutions: Mapping[str, Solution], trials: list[Trial]) -> None:
    """Refuse a network without weights; warn where all layers were sparser than the target asks."""
    if solutions and not any(solution.kept for solution in solutions.values()):
        raise empty_target(asked.target)
    if asked.numerics.prune_bias or trials or isinstance(asked.target, Pattern):
        return
    layers = asked.layers
    pairs = [(int((layer.weight != 0).sum()), solutions[layer.name].kept) for layer in layers]
    there, kept = (sum(numbers) for numbers in zip(*pairs, strict=True)) if pairs else (0, 0)
    total = sum(layer.weight.numel() for layer in layers)
    if all(had <= left for had, left in pairs) and there < kept < total:
        caution(
            f"these layers had {there:,} weights other than zero, and {kept:,} are kept: keep "
            "fewer than they had."
        )


def _write_back(pruned: nn.Module, model: nn.Module) -> None:
    """Copy the pruned network's tensors into a network: all of them or, on any error, none."""
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
