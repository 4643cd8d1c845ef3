"""Prune a network in stages: prune, retrain lightly, prune further, retrain again."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from lobs.calibration.batches import user_code
from lobs.calibration.forward import evaluating
from lobs.errors import FileError, TrainingError
from lobs.pruning.api import prune
from lobs.pruning.options import Execution, PruneOptions, checked
from lobs.storage.atomic import make_folder
from lobs.storage.checkpoint import load, save
from lobs.storage.digest import digest_of, digest_of_data
from lobs.targets import Budget, Sparsity, Target, wanted
from lobs.training.retrain import STATE, Retraining, retrain
from lobs.training.settings import (
    RetrainOptions,
    RetrainSettings,
    Score,
    check_execution,
    check_options,
    check_repeatable,
)

_EXAMPLE = "[Stage(keep=0.07, iterations=500)]"


@dataclass(frozen=True)
class Stage:
    """One stage: prune to a target, counted from the *dense* network, then train.

    Args:
        target: `Sparsity`, `Budget` or another target of `prune`.
        iterations: the most iterations to train.
        until_score: stop training as soon as the score of `evaluate` is at least this.
        keep: the fraction of weights to keep, in place of a target.
    """

    target: Target | None = None
    iterations: int = 0
    until_score: float | None = None
    keep: float | str | Mapping[str, float | str] | None = None

    def __post_init__(self) -> None:
        _ = self.wanted  # which refuses what cannot be a target

    @property
    def wanted(self) -> Target:
        """The target that `target` or `keep` asks for."""
        return wanted(self.target, self.keep)


@dataclass(frozen=True)
class StageResult:
    """One stage's numbers: weights kept, scores after pruning and after training, iterations."""

    kept: int
    total: int
    pruned_score: float | None
    score: float | None
    iterations: int
    history: tuple[tuple[int, float], ...] = ()

    @property
    def kept_fraction(self) -> float:
        """Kept weights over all weights of the pruned layers, bias not counted."""
        return self.kept / self.total if self.total else 1.0


@dataclass(frozen=True, eq=False, repr=False)
class StagedResult:
    """The network after the last stage, its masks, and a result per stage."""

    model: nn.Module
    masks: dict[str, Tensor]
    stages: tuple[StageResult, ...]
    seconds: float

    @property
    def iterations(self) -> int:
        """Training iterations of all stages together."""
        return sum(stage.iterations for stage in self.stages)

    def __repr__(self) -> str:
        last = self.stages[-1]
        return (
            f"StagedResult({len(self.stages)} stages, kept {last.kept:,} of {last.total:,} "
            f"weights, {self.iterations:,} iterations, {self.seconds:.1f} s)"
        )


def prune_in_stages(
    model: nn.Module,
    batches: Iterable[Any],
    data: Iterable[Any],
    stages: Sequence[Stage],
    *,
    evaluate: Score | None = None,
    pruning: PruneOptions | None = None,
    retraining: RetrainOptions | None = None,
    execution: Execution | None = None,
    progress: bool = True,
) -> StagedResult:
    """Prune and retrain in turn: every stage prunes the network that the stage before it trained.

    Weights that are already zero cost nothing to remove, so masks shrink from stage to stage. A
    solver that sees other inputs than before may exchange weights, but never changes the count.

    Args:
        model: the dense network; it is not changed.
        batches: calibration inputs, as for `prune`; a list or a DataLoader.
        data: training batches, as for `retrain`.
        stages: targets and training lengths, stage by stage.
        evaluate: a function of a network that returns its score, larger is better.
        pruning: further options of `prune`, such as `{"solver": "lobs"}`.
        retraining: further options of `retrain`, such as `{"optimizer": sgd(0.05)}`.
        execution: `resume`, a folder for finished stages and the training state; `memory`, for the
            pruning; and `log`.
        progress: show bars on a terminal.
    """
    stages = [stages] if isinstance(stages, Stage) else list(stages)
    chosen = check_execution(execution, "prune_in_stages", "resume", "memory", "log")
    work = _Work(
        batches, data, evaluate, pruning or {}, retraining or {}, replace(chosen, resume=None),
        progress,
    )  # fmt: skip
    work.check(model, stages)
    folder = None if chosen.resume is None else make_folder(chosen.resume)
    longest = max(1, *(stage.iterations for stage in stages))
    store = _StageStore(folder, work, model, longest)
    began = time.perf_counter()
    now, masks, done = model, dict[str, Tensor](), list[StageResult]()
    for number, stage in enumerate(stages, start=1):
        stored = store.read(number, stage, now)
        if stored is None:
            stored = work.run(now, stage, store.training_folder(number))
            store.write(number, stage, *stored)
        now, masks, result = stored
        done.append(result)
    return StagedResult(now, masks, tuple(done), time.perf_counter() - began)


@dataclass(frozen=True, eq=False, repr=False)
class _Work:
    """What all stages share: data, score and options."""

    batches: Iterable[Any]
    data: Iterable[Any]
    evaluate: Score | None
    pruning: PruneOptions
    retraining: RetrainOptions
    execution: Execution
    progress: bool

    def check(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        """Refuse, before the first stage begins, what a later one could not do."""
        if not stages:
            raise TrainingError(f"there are no stages: give at least one, such as {_EXAMPLE}.")
        if not all(isinstance(stage, Stage) for stage in stages):
            raise TrainingError(f"stages are {stages!r}: give a list such as {_EXAMPLE}.")
        if "execution" in self.pruning:
            raise TrainingError(
                "pruning has 'execution': give it to prune_in_stages itself, for all stages."
            )
        own = sorted({"iterations", "until_score", "evaluate", "execution"} & {*self.retraining})
        if own:
            raise TrainingError(
                f"retraining has '{own[0]}': give it to its Stage or to prune_in_stages itself."
            )
        check_options(self.retraining)
        check_repeatable(self.data)
        for stage in stages:
            checked(model, stage.wanted, self._prune_options())
            self._settings(stage)
        for before, after in pairwise(_kept(stage.wanted) for stage in stages):
            if before[0] == after[0] and after[1] > before[1] + 1e-9:
                raise TrainingError(
                    f"a stage keeps {after[1]:.3g} {after[0]} after one that kept "
                    f"{before[1]:.3g}: keep less from stage to stage."
                )

    def score_of(self, model: nn.Module) -> float | None:
        """Return the score of the dense network, by which a resumed run knows its `evaluate`."""
        if self.evaluate is None:
            return None
        with user_code("evaluate"), evaluating(model):
            return float(self.evaluate(model))

    def run(
        self, model: nn.Module, stage: Stage, folder: Path | None
    ) -> tuple[nn.Module, dict[str, Tensor], StageResult]:
        """Prune a network and retrain it; return it with its masks and the stage's numbers."""
        cut = prune(
            model, self.batches, stage.wanted, progress=self.progress, **self._prune_options()
        )
        trained = self._retrain(cut.model, cut.masks, stage, folder)
        first = trained.history[0][1] if trained.history else None
        result = StageResult(
            cut.kept, cut.total, first, trained.score, trained.iterations, trained.history
        )
        return trained.model, cut.masks, result

    def _retrain(
        self, model: nn.Module, masks: Mapping[str, Tensor], stage: Stage, folder: Path | None
    ) -> Retraining:
        execution = Execution(resume=folder, log=self.execution.log)
        trained = retrain(
            model,
            masks,
            self.data,
            iterations=stage.iterations,
            evaluate=self.evaluate,
            until_score=stage.until_score,
            progress=self.progress,
            execution=execution,
            **self.retraining,
        )
        if folder is not None:  # the finished stage replaces it
            (folder / STATE).unlink(missing_ok=True)
            folder.rmdir()
        return trained

    def _prune_options(self) -> PruneOptions:
        return cast(PruneOptions, {**self.pruning, "execution": self.execution})

    def _settings(self, stage: Stage) -> RetrainSettings:
        return RetrainSettings(
            iterations=stage.iterations,
            evaluate=self.evaluate,
            until_score=stage.until_score,
            **self.retraining,
        )


class _StageStore:
    """Finished stages in a folder; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, work: _Work, model: nn.Module, longest: int) -> None:
        self.folder = folder
        self._identity = (
            {}
            if folder is None
            else {
                "pruning": _identified(work.pruning),
                "retraining": _identified(work.retraining),
                "start": digest_of(model)[:16],
                "inputs": digest_of_data(work.batches, sys.maxsize),
                "data": digest_of_data(work.data, longest),
                "score": work.score_of(model),
            }
        )

    def training_folder(self, number: int) -> Path | None:
        """Return the folder of a stage's training state."""
        return None if self.folder is None else self.folder / f"stage-{number}"

    def write(
        self,
        number: int,
        stage: Stage,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        result: StageResult,
    ) -> None:
        """Keep a finished stage."""
        if self.folder is not None:
            record = {**self._identity, "stage": _identified(stage), "result": vars(result)}
            save(model, self._file(number), masks, record)

    def read(
        self, number: int, stage: Stage, model: nn.Module
    ) -> tuple[nn.Module, dict[str, Tensor], StageResult] | None:
        """Return a finished stage, or None. A stage of another run raises `FileError`."""
        if self.folder is None or not self._file(number).is_file():
            return None
        saved = load(self._file(number))
        for key, value in {**self._identity, "stage": _identified(stage)}.items():
            if saved.record.get(key) != value:
                raise FileError(
                    f"'{self._file(number)}' holds another {_NAMES[key]} "
                    f"({saved.record.get(key)}). Give an empty folder, or delete it."
                )
        copied = copy.deepcopy(model)
        copied.load_state_dict(saved.state_dict)
        numbers = dict(saved.record["result"])
        history = tuple((int(i), float(score)) for i, score in numbers.pop("history"))
        return copied, dict(saved.masks), StageResult(**numbers, history=history)

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"stage-{number}.safetensors"


_NAMES = {
    "stage": "stage",
    "pruning": "way of pruning",
    "retraining": "way of retraining",
    "start": "network",
    "inputs": "calibration",
    "data": "training data",
    "score": "score",
}


def _kept(target: Target) -> tuple[str, float]:
    """Return what a target counts and how much of it is kept; stages with one unit compare."""
    match target:
        case Sparsity(fraction=int() | float() as removed):
            return "of the network", 1 - removed
        case Budget(parameters=int() as weights):
            return "weights", float(weights)
    return "", 0.0


def _identified(value: Any) -> str:
    """Return settings as text that is the same in every process, with a hash of all they hold."""
    given = value if isinstance(value, Mapping) else vars(value)
    shown = ", ".join(f"{key}: {_printed(given[key])}" for key in sorted(given))
    return f"{{{shown}}} #{digest_of(dict(given))[:8]}"


def _printed(value: Any) -> str:
    """Return a value's repr, or its name or type where the repr is no description."""
    if isinstance(value, nn.Module) or " at 0x" in repr(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)
