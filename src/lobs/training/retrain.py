"""Train a pruned network further with its zeros held: iterations counted, stopped as soon as the network is good enough.

For a training loop of one's own, `lobs.hold` alone keeps the zeros.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs._system.progress import shown, track
from lobs.calibration.batches import told
from lobs.calibration.forward import call, evaluating
from lobs.errors import TrainingError
from lobs.storage.train_state import Run
from lobs.training.hold import hold

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Decay: TypeAlias = Literal["constant", "linear", "cosine"]
_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
}


@dataclass(frozen=True)
class Shuffled:
    """Inputs and labels as batches, in a new order drawn from torch's generator at every pass; a short rest is left out."""

    inputs: Tensor
    labels: Tensor
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.batch_size <= len(self.inputs) or len(self.inputs) != len(self.labels):
            raise TrainingError(
                f"{len(self.inputs)} inputs and {len(self.labels)} labels do not make batches of "
                f"{self.batch_size}: "
                f"give as many labels as inputs, and batches no larger than the data."
            )

    def __len__(self) -> int:
        return len(self.inputs) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.inputs))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            pick = order[start : start + self.batch_size]
            yield self.inputs[pick], self.labels[pick]


@dataclass(frozen=True, eq=False)
class Retraining:
    """A retrained network.

    `history` holds (iteration, error) pairs, the first before any training; `reached` says whether
    the wanted error was met, None where none was wanted.
    """

    model: nn.Module
    iterations: int
    history: tuple[tuple[int, float], ...] = ()
    reached: bool | None = None
    seconds: float = 0.0

    @property
    def error(self) -> float | None:
        """What `evaluate` said last."""
        return self.history[-1][1] if self.history else None


def distillation(temperature: float = 2.0) -> Loss:
    """The Kullback–Leibler distance from softened teacher outputs to softened outputs, times temperature²."""

    def loss(outputs: Tensor, teacher: Tensor) -> Tensor:
        student, wanted = (F.log_softmax(z / temperature, dim=1) for z in (outputs, teacher))
        return F.kl_div(student, wanted, reduction="batchmean", log_target=True) * temperature**2

    return loss


def sgd(
    learning_rate: float = 0.05, momentum: float = 0.9, weight_decay: float = 0.0
) -> MakeOptimizer:
    """Nesterov momentum, as the zoo's networks were trained with."""
    return lambda parameters: torch.optim.SGD(
        parameters,
        learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=momentum > 0,
    )


def retrain(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    data: Iterable[Any],
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    iterations: int = 500,
    decay: Decay = "constant",
    evaluate: Callable[[nn.Module], float] | None = None,
    until_error: float | None = None,
    every: int = 50,
    teacher: nn.Module | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    inplace: bool = False,
    progress: bool = True,
) -> Retraining:
    """Train on while the removed weights stay exactly zero, and count the iterations.

    Args:
        model: the pruned network; untouched unless `inplace`.
        masks: True = kept, by parameter name, as `PruningResult.masks` gives them.
        data: batches of (input, label), run through again and again: `Shuffled`, a DataLoader or a
            list; a teacher needs no labels.
        loss: of (outputs, labels), or of (outputs, teacher's outputs); cross entropy, or
            `distillation()`, by default.
        optimizer: makes an optimiser from a list of parameters; `sgd()`, at the rate the LeNets
            were trained with, by default.
        iterations: the most to run.
        decay: how the learning rate falls over them; constant, as in the paper, by default.
        evaluate: an error, lower is better, looked at every `every` iterations and at the end.
        until_error: stop as soon as `evaluate` says no more than this.
        every: iterations between looks, and between writings of `checkpoint`.
        teacher: the dense network, to learn its outputs instead of labels.
        seed: of the order of the data and of dropout; torch's own generator is left as it was.
        checkpoint: a file to write the run's state to, and to go on from if it is there; the end is
            the same to the bit.
        inplace: train `model` itself.
        progress: draw a bar on a terminal.
    """
    check_training(iterations, every, decay, evaluate, until_error, data)
    if not isinstance(masks, Mapping):
        raise TrainingError(
            f"masks is a {type(masks).__name__}: give a mapping of masks by parameter name, as "
            "PruningResult.masks is."
        )
    if optimizer is not None and (
        not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)
    ):
        raise TrainingError(
            f"optimizer is a {type(optimizer).__name__}: give a function that makes one, such as "
            "lambda parameters: torch.optim.SGD(parameters, 0.01), since the network is trained as "
            "a copy."
        )
    trained = model if inplace else copy.deepcopy(model)
    make = optimizer or sgd()
    steps = make([p for p in trained.parameters() if p.requires_grad])
    job = _Job(
        data,
        loss or (F.cross_entropy if teacher is None else distillation()),
        teacher,
        evaluate,
        until_error,
        every,
    )
    began = time.perf_counter()
    modes = [(module, module.training) for module in trained.modules()]
    trained.train()
    try:
        with shown(progress), torch.random.fork_rng(devices=[]), hold(trained, masks, steps):
            torch.manual_seed(seed)
            run = Run(
                trained,
                steps,
                torch.Generator(),
                counters={"iteration": 0, "history": [], "taken": 0},
            )
            settings = {
                "iterations": iterations,
                "decay": decay,
                "seed": seed,
                "masks": _fingerprint(masks),
                "optimizer": repr(steps),
            }
            job.work(
                run,
                iterations,
                _DECAYS[decay],
                None if checkpoint is None else Path(checkpoint),
                settings,
            )
    finally:
        for module, mode in modes:
            module.training = mode
    history = tuple((int(i), float(e)) for i, e in run.counters["history"])
    reached = None if until_error is None else history[-1][1] <= until_error
    return Retraining(
        trained, run.counters["iteration"], history, reached, time.perf_counter() - began
    )


@dataclass
class _Job:
    """One run: where its batches come from, what it minimises, when it looks and when it stops."""

    data: Iterable[Any]
    loss: Loss
    teacher: nn.Module | None
    evaluate: Callable[[nn.Module], float] | None
    until_error: float | None
    every: int
    rates: list[float] = field(default_factory=list)

    def work(
        self,
        run: Run,
        iterations: int,
        factor: Callable[[float], float],
        path: Path | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.rates = [group["lr"] for group in run.optimizer.param_groups]
        if path is None or not run.load(path, settings):
            run.extra["pass"] = torch.get_rng_state()
            self._look(run)
        batches = self._batches(run)
        with track("retrain", iterations) as advance:
            advance(run.counters["iteration"])
            while run.counters["iteration"] < iterations and not self._good(run):
                at = run.counters["iteration"]
                for group, rate in zip(run.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * factor(at / iterations)
                self._step(run, next(batches))
                run.counters["iteration"] = at + 1
                advance(1)
                if (at + 1) % self.every == 0 or at + 1 == iterations:
                    self._look(run)
                    if path is not None:
                        run.save(path, settings)

    def _step(self, run: Run, batch: Any) -> None:
        outputs = call(run.model, batch)
        if self.teacher is None:
            wanted = self._labels(batch, outputs)
        else:
            with evaluating(self.teacher):
                wanted = call(self.teacher, batch)
        with told(
            f"the loss of outputs of shape {tuple(outputs.shape)} and labels of shape "
            f"{tuple(wanted.shape)}"
        ):
            loss = self.loss(outputs, wanted)
        if not bool(torch.isfinite(loss)):
            done = run.counters["iteration"]
            remedy = (
                "Use a smaller learning rate."
                if done
                else "Check the network and the first batch: nothing was trained yet."
            )
            raise TrainingError(
                f"the loss is {float(loss.detach())} after {done} iterations. {remedy}"
            )
        run.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()

    def _labels(self, batch: Any, outputs: Tensor) -> Tensor:
        if not (
            isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[1], Tensor)
        ):
            raise TrainingError(
                f"a batch of data is a {type(batch).__name__} without labels: give (input, label) "
                "pairs, or a teacher."
            )
        return batch[1].to(outputs.device)

    def _batches(self, run: Run) -> Iterator[Any]:
        """Pass after pass; a resumed run shuffles as the interrupted one did and leaves out what that had taken."""
        taken = run.counters["taken"]
        # What dropout drew in the part of a pass that a resumed run leaves out has to be drawn from
        # the generator again.
        drawn = torch.get_rng_state() if taken else None
        while True:
            torch.set_rng_state(run.extra["pass"])
            for index, batch in enumerate(self.data):
                if index < taken:
                    continue
                drawn = _restored(drawn)
                run.counters["taken"] = index + 1
                yield batch
            if run.counters["taken"] == 0:
                raise TrainingError(
                    "there are no batches to train on: the data is empty, or a generator that is "
                    "used up."
                )
            drawn = _restored(
                drawn
            )  # an interruption at the very end of a pass leaves out all of it
            run.counters["taken"], taken = 0, 0
            run.extra["pass"] = torch.get_rng_state()

    def _look(self, run: Run) -> None:
        if self.evaluate is not None:
            with torch.random.fork_rng(
                devices=[]
            ):  # looking must not change what training draws next
                with told("evaluate"):
                    error = float(self.evaluate(run.model))
                run.counters["history"].append([run.counters["iteration"], error])

    def _good(self, run: Run) -> bool:
        return self.until_error is not None and run.counters["history"][-1][1] <= self.until_error


def _restored(state: Tensor | None) -> Tensor | None:
    """Put torch's generator where it was, once: there is nothing left to restore after that."""
    if state is not None:
        torch.set_rng_state(state)
    return None


def check_training(
    iterations: int,
    every: int,
    decay: str,
    evaluate: Callable[[nn.Module], float] | None,
    until_error: float | None,
    data: Iterable[Any],
) -> None:
    """Refuse arguments of `retrain` that cannot be meant, before anything is trained."""
    whole = isinstance(iterations, Integral) and isinstance(every, Integral)
    if not whole or iterations < 0 or every < 1:
        raise TrainingError(
            f"iterations = {iterations!r}, every = {every!r}: train for 0 or more, and look every "
            "1 or more."
        )
    if decay not in list(_DECAYS):
        raise TrainingError(f"decay is '{decay}': use {', '.join(_DECAYS)}.")
    if until_error is not None and evaluate is None:
        raise TrainingError("until_error needs evaluate, to know the error.")
    if isinstance(data, Iterator):
        raise TrainingError(
            "data is run through again and again: pass a list, a DataLoader or Shuffled, not a "
            "generator."
        )


def _fingerprint(masks: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, mask in sorted(masks.items()):
        digest.update(name.encode() + mask.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
