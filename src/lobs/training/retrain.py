"""Train a pruned network while its zeros are held. `lobs.hold` does that in any other loop."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lobs._system.context import alone
from lobs._system.progress import shown
from lobs._system.run_log import recorded_run
from lobs.pruning.options import Execution
from lobs.storage.atomic import make_folder
from lobs.storage.digest import digest_of, digest_of_data, identified
from lobs.storage.train_state import TrainingState
from lobs.training.hold import hold
from lobs.training.loop import TrainingLoop
from lobs.training.objectives import sgd
from lobs.training.settings import (
    RetrainOptions,
    RetrainSettings,
    Score,
    check_execution,
    check_inputs,
    check_options,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

STATE = "training.safetensors"  # the training state's name in the folder of Execution(resume=…)


@dataclass(frozen=True, eq=False, repr=False)
class Retraining:
    """A retrained network.

    `history` has (iteration, score) pairs, the first from before any training. `reached` says
    whether the wanted score was reached; None if none was wanted.
    """

    model: nn.Module
    iterations: int
    history: tuple[tuple[int, float], ...] = ()
    reached: bool | None = None
    seconds: float = 0.0

    @property
    def score(self) -> float | None:
        """The last score of `evaluate`; larger is better."""
        return self.history[-1][1] if self.history else None

    def __repr__(self) -> str:
        scores = f"score {self.history[0][1]:.4g} → {self.score:.4g}, " if self.history else ""
        return f"Retraining({self.iterations:,} iterations, {scores}{self.seconds:.1f} s)"


def retrain(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    data: Iterable[Any],
    *,
    iterations: int = 500,
    evaluate: Score | None = None,
    until_score: float | None = None,
    inplace: bool = False,
    progress: bool = True,
    execution: Execution | None = None,
    **options: Unpack[RetrainOptions],
) -> Retraining:
    """Train a pruned network further while its removed weights stay exactly zero.

    Args:
        model: the pruned network; it is copied unless `inplace`.
        masks: True = kept, by parameter name, such as `PruningResult.masks`.
        data: batches of (input, label), read many times: `Shuffled`, a DataLoader or a list. With a
            teacher, labels are not needed.
        iterations: the most iterations to run.
        evaluate: a function of a network that returns its score, larger is better. It is called
            before training, every `every` iterations and at the end.
        until_score: stop as soon as the score is at least this.
        inplace: train `model` itself.
        progress: show a bar on a terminal.
        execution: `resume`, a folder for the training state, and `log`. A resumed run ends with the
            same bits as an uninterrupted one.
        **options: `loss`, `optimizer`, `decay`, `every`, `teacher`, `seed`; see
            `lobs.training.settings.RetrainOptions`.
    """
    check_options(options)
    chosen = check_execution(execution, "retrain", "resume", "log")
    check_inputs(masks, data)
    settings = RetrainSettings(
        iterations=iterations, evaluate=evaluate, until_score=until_score, **options
    )
    file = None if chosen.resume is None else make_folder(chosen.resume) / STATE
    trained = model if inplace else copy.deepcopy(model)
    began = time.perf_counter()
    with alone(), shown(progress), recorded_run(chosen.log):
        state, reached = _train(trained, masks, TrainingLoop(data, settings), file)
    return Retraining(
        trained,
        state.counters["iteration"],
        tuple((int(i), float(score)) for i, score in state.counters["history"]),
        None if until_score is None else reached,
        time.perf_counter() - began,
    )


def _train(
    model: nn.Module, masks: Mapping[str, Tensor], loop: TrainingLoop, file: Path | None
) -> tuple[TrainingState, bool]:
    """Train in place; return the final state and whether the wanted score was reached."""
    settings = loop.settings
    make = settings.optimizer or sgd()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    identity = {
        "iterations": settings.iterations,
        "decay": settings.decay,
        "seed": settings.seed,
        "masks": digest_of(dict(sorted(masks.items())))[:16],
        "optimizer": repr(optimizer),
    }
    if file is not None:
        identity |= _decisive(model, loop)
    counters = {"iteration": 0, "history": [], "taken": 0}
    with (
        _training_mode(model),
        torch.random.fork_rng(devices=[]),
        hold(model, masks, optimizer),
    ):
        torch.manual_seed(settings.seed)
        state = TrainingState(model, optimizer, torch.Generator(), counters=counters)
        loop.run(state, file, identity)
    return state, loop.reached(state)


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put a network into training mode; give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _decisive(model: nn.Module, loop: TrainingLoop) -> dict[str, Any]:
    """Return hashes of what else decides the result, for a training state that is resumed."""
    settings = loop.settings
    return {
        "network": digest_of(model)[:16],
        "data": digest_of_data(loop.data, max(1, settings.iterations)),
        "loss": identified(settings.loss),
        "teacher": None if settings.teacher is None else digest_of(settings.teacher)[:16],
        "every": settings.every,
        "until_score": settings.until_score,
    } | ({} if settings.until_score is None else {"evaluate": identified(settings.evaluate)})
