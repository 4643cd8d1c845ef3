"""Iterative pruning: prune, retrain lightly, prune further, retrain again, for as many stages as wanted."""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lobs.checkpoint import load, save
from lobs.errors import FileError, TrainingError
from lobs.pipeline import prune
from lobs.retraining import Retraining, check_training, retrain
from lobs.targets import Sparsity, Target, as_target


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


def iterate(
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

    Weights that are already zero cost nothing to remove, so they go first and masks shrink from stage to stage; a method that
    re-solves against other inputs may exchange a few, never changing the count.

    Args:
        model: the dense network; untouched.
        batches: calibration inputs, as for `prune`; a list or a DataLoader.
        data: training batches, as for `retrain`.
        stages: what to keep and how long to train, stage by stage.
        evaluate: an error, lower is better.
        pruning: further arguments of `prune`, such as `{"solver": "lobs"}`.
        retraining: further arguments of `retrain`, such as `{"optimizer": sgd(0.05), "teacher": model}`.
        folder: where to keep each finished stage; a run of this network that was interrupted goes on from there.
        progress: draw bars on a terminal.
    """
    if not stages:
        raise TrainingError("there are no stages: give at least one, such as Stage(0.93, iterations=500).")
    _check_falling(stages)
    told = {"every": 50, "decay": "constant", **(retraining or {})}
    for stage in stages:
        check_training(stage.iterations, told["every"], told["decay"], evaluate, stage.until_error, data)
    home = None if folder is None else Path(folder)
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    now, masks, done = model, dict[str, Tensor](), list[StageResult]()
    start = None if home is None else _fingerprint(model)
    for index, stage in enumerate(stages):
        file = None if home is None else home / f"stage-{index + 1}.safetensors"
        record = {"stage": repr(stage), "pruning": repr(pruning or {}), "start": start}
        taken = _finished(file, record, now)
        if taken is not None:
            now, masks, result = taken
        else:
            cut = prune(now, batches, stage.target, progress=progress, **(pruning or {}))
            trained = _trained(cut.model, cut.masks, data, stage, evaluate, retraining or {}, file, progress)
            now, masks = trained.model, cut.masks
            first = trained.history[0][1] if trained.history else None
            result = StageResult(cut.kept, cut.total, first, trained.error, trained.iterations, trained.history)
            _keep(file, record, now, masks, result)
        done.append(result)
    return Iteration(now, masks, tuple(done), time.perf_counter() - began)


def _check_falling(stages: Sequence[Stage]) -> None:
    """Refuse a stage that keeps more of the network than the one before it: what is gone does not come back."""
    kept = [1 - float(f) for stage in stages if (f := _fraction(stage.target)) is not None]
    for before, after in pairwise(kept if len(kept) == len(stages) else []):
        if after > before:
            raise TrainingError(f"a stage keeps {after:.3g} of the network after one that kept {before:.3g}: let them fall.")


def _fraction(target: Target | float) -> float | None:
    """What one number for the whole network removes."""
    target = as_target(target)
    if isinstance(target, Sparsity) and not isinstance(target.fraction, Mapping):
        return float(target.fraction)
    return None


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
    wanted = {"iterations": stage.iterations, "until_error": stage.until_error, "evaluate": evaluate, "checkpoint": state}
    trained = retrain(model, masks, data, **{"progress": progress, **arguments, **wanted})
    if state is not None:
        state.unlink(missing_ok=True)  # the finished stage takes its place
    return trained


def _keep(
    file: Path | None, record: Mapping[str, Any], model: nn.Module, masks: Mapping[str, Tensor], result: StageResult
) -> None:
    if file is not None:
        save(file, model, masks, {**record, "result": vars(result)})


def _finished(
    file: Path | None, record: Mapping[str, Any], model: nn.Module
) -> tuple[nn.Module, dict[str, Tensor], StageResult] | None:
    if file is None or not file.is_file():
        return None
    saved = load(file)
    for key, what in (("stage", "stage"), ("pruning", "way of pruning"), ("start", "network")):
        if saved.record.get(key) != record[key]:
            raise FileError(f"'{file}' holds another {what} ({saved.record.get(key)}). Give an empty folder, or delete it.")
    copied = copy.deepcopy(model)
    copied.load_state_dict(saved.state_dict)
    fields = dict(saved.record["result"])
    history = tuple((int(i), float(e)) for i, e in fields.pop("history"))
    return copied, dict(saved.masks), StageResult(**fields, history=history)


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
