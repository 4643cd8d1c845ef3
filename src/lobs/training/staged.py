"""Iterative pruning: prune, retrain lightly, prune further, retrain again, for as many stages as wanted."""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from lobs.errors import FileError, TrainingError
from lobs.pruning.api import prune
from lobs.pruning.options import check
from lobs.storage.atomic import make_folder
from lobs.storage.checkpoint import load, save
from lobs.storage.run_store import weights_hash
from lobs.targets import Budget, Sparsity, Target, as_target
from lobs.training.retrain import Retraining, check_training, retrain


@dataclass(frozen=True)
class Stage:
    """Prune to `target`, a fraction of the *dense* network's weights or an error, then train for at most `iterations`."""

    target: Target | float
    iterations: int = 0
    until_error: float | None = None


@dataclass(frozen=True)
class StageResult:
    """What one stage did: weights left, errors right after pruning and after training, iterations used."""

    kept: int
    total: int
    pruned_error: float | None
    error: float | None
    iterations: int
    history: tuple[tuple[int, float], ...] = ()

    @property
    def kept_fraction(self) -> float:
        """Kept weights over all weights of the pruned layers, bias not counted."""
        return self.kept / self.total if self.total else 1.0


@dataclass(frozen=True, eq=False)
class Iteration:
    """The network after the last stage, its masks, and a result per stage."""

    model: nn.Module
    masks: dict[str, Tensor]
    stages: tuple[StageResult, ...]
    seconds: float

    @property
    def iterations(self) -> int:
        """Training iterations of all stages together."""
        return sum(stage.iterations for stage in self.stages)


def prune_in_stages(
    model: nn.Module,
    batches: Iterable[Any],
    data: Iterable[Any],
    stages: Sequence[Stage],
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    pruning: Mapping[str, Any] | None = None,
    retraining: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Iteration:
    """Iterative L-OBS, or the same with any other solver: every stage prunes what the one before it has retrained.

    Weights that are already zero cost nothing to remove, so they go first and masks shrink from
    stage to stage; a method that re-solves against other inputs may exchange a few, never changing
    the count.

    Args:
        model: the dense network; untouched.
        batches: calibration inputs, as for `prune`; a list or a DataLoader.
        data: training batches, as for `retrain`.
        stages: what to keep and how long to train, stage by stage.
        evaluate: an error, lower is better.
        pruning: further arguments of `prune`, such as `{"solver": "lobs"}`.
        retraining: further arguments of `retrain`, such as `{"optimizer": sgd(0.05), "teacher":
            model}`.
        folder: where to keep each finished stage; a run of this network that was interrupted goes
            on from there.
        progress: draw bars on a terminal.
    """
    stages = [stages] if isinstance(stages, Stage) else list(stages)
    pruning, retraining = dict(pruning or {}), dict(retraining or {})
    _check(model, data, stages, evaluate, pruning, retraining)
    home = None if folder is None else make_folder(folder)
    began = time.perf_counter()
    now, masks, done = model, dict[str, Tensor](), list[StageResult]()
    start = None if home is None else weights_hash(model)
    for index, stage in enumerate(stages):
        file = None if home is None else home / f"stage-{index + 1}.safetensors"
        record = {
            "stage": repr(stage),
            "pruning": _told(pruning),
            "retraining": _told(retraining),
            "start": start,
        }
        taken = _finished(file, record, now)
        if taken is not None:
            now, masks, result = taken
        else:
            cut = prune(now, batches, stage.target, **{"progress": progress, **pruning})
            trained = _trained(
                cut.model, cut.masks, data, stage, evaluate, retraining, file, progress
            )
            now, masks = trained.model, cut.masks
            first = trained.history[0][1] if trained.history else None
            result = StageResult(
                cut.kept, cut.total, first, trained.error, trained.iterations, trained.history
            )
            _keep(file, record, now, masks, result)
        done.append(result)
    return Iteration(now, masks, tuple(done), time.perf_counter() - began)


def _check(
    model: nn.Module,
    data: Iterable[Any],
    stages: Sequence[Stage],
    evaluate: Callable[[nn.Module], float] | None,
    pruning: Mapping[str, Any],
    retraining: Mapping[str, Any],
) -> None:
    """Refuse what a later stage could not do before the first one begins."""
    if not stages:
        raise TrainingError(
            "there are no stages: give at least one, such as Stage(0.93, iterations=500)."
        )
    if not all(isinstance(stage, Stage) for stage in stages):
        raise TrainingError(
            f"stages are {stages!r}: give a list such as [Stage(0.93, iterations=500)]."
        )
    own = sorted({"iterations", "until_error", "evaluate", "checkpoint"} & retraining.keys())
    if own:
        raise TrainingError(
            f"retraining has '{own[0]}', which is the stages' own or an argument of iterate: give "
            "it there."
        )
    told = {"every": 50, "decay": "constant", **retraining}
    of_target = {
        key: pruning[key] for key in ("inputs", "layers", "skip", "prune_bias") if key in pruning
    }
    for stage in stages:
        check(model, stage.target, **of_target)
        check_training(
            stage.iterations, told["every"], told["decay"], evaluate, stage.until_error, data
        )
    for before, after in pairwise(_kept(as_target(stage.target)) for stage in stages):
        if before[0] == after[0] and after[1] > before[1] + 1e-9:
            raise TrainingError(
                f"a stage keeps {after[1]:.3g} {after[0]} after one that kept {before[1]:.3g}: let "
                "them fall."
            )


def _kept(target: Target) -> tuple[str, float]:
    """What one number for the whole network keeps of it, and in what it is counted; stages of other kinds do not compare."""
    match target:
        case Sparsity(fraction=int() | float() as removed):
            return "of the network", 1 - removed
        case Budget(parameters=int() as weights):
            return "weights", float(weights)
    return "", 0.0


def _told(value: Any) -> str:
    """Settings in words that are the same when the same program runs again: functions by name, and by what they were given."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_told(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, FunctionType):
        given = inspect.getclosurevars(value).nonlocals
        plain = {
            name: x for name, x in given.items() if not isinstance(x, FunctionType)
        }  # one may refer to itself
        return f"{value.__module__}.{value.__qualname__}{_told(plain)}"
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)


def _trained(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    data: Iterable[Any],
    stage: Stage,
    evaluate: Callable[[nn.Module], float] | None,
    arguments: Mapping[str, Any],
    file: Path | None,
    progress: bool,
) -> Retraining:
    state = None if file is None else file.with_suffix(".state")
    wanted = {
        "iterations": stage.iterations,
        "until_error": stage.until_error,
        "evaluate": evaluate,
        "checkpoint": state,
    }
    trained = retrain(model, masks, data, **{"progress": progress, **arguments, **wanted})
    if state is not None:
        state.unlink(missing_ok=True)  # the finished stage takes its place
    return trained


def _keep(
    file: Path | None,
    record: Mapping[str, Any],
    model: nn.Module,
    masks: Mapping[str, Tensor],
    result: StageResult,
) -> None:
    if file is not None:
        save(model, file, masks, {**record, "result": vars(result)})


def _finished(
    file: Path | None, record: Mapping[str, Any], model: nn.Module
) -> tuple[nn.Module, dict[str, Tensor], StageResult] | None:
    if file is None or not file.is_file():
        return None
    saved = load(file)
    for key, what in (
        ("stage", "stage"),
        ("pruning", "way of pruning"),
        ("retraining", "way of retraining"),
        ("start", "network"),
    ):
        if saved.record.get(key) != record[key]:
            raise FileError(
                f"'{file}' holds another {what} ({saved.record.get(key)}). Give an empty folder, "
                "or delete it."
            )
    copied = copy.deepcopy(model)
    copied.load_state_dict(saved.state_dict)
    fields = dict(saved.record["result"])
    history = tuple((int(i), float(e)) for i, e in fields.pop("history"))
    return copied, dict(saved.masks), StageResult(**fields, history=history)
