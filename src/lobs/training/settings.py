"""The options of `retrain`, checked before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from lobs.errors import TrainingError
from lobs.pruning.options import Execution

if TYPE_CHECKING:
    from lobs.training.objectives import Loss, MakeOptimizer

Decay: TypeAlias = Literal["constant", "linear", "cosine"]
Score: TypeAlias = Callable[[nn.Module], float]
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
}


class RetrainOptions(TypedDict, total=False):
    """Keyword arguments that `retrain` and `prune_in_stages` share.

    Args:
        loss: a function of (outputs, labels), or of (outputs, teacher outputs). The default is
            cross entropy, or `distillation()` with a teacher.
        optimizer: a function that makes an optimiser from a list of parameters; `sgd()` by default.
        decay: how the learning rate falls: "constant" (the default), "linear" or "cosine".
        every: iterations between evaluations, and between writes of the training state.
        teacher: the dense network, whose outputs replace the labels.
        seed: of the data order and of dropout. torch's own generator is left as it was.
    """

    loss: Loss | None
    optimizer: MakeOptimizer | None
    decay: Decay
    every: int
    teacher: nn.Module | None
    seed: int


@dataclass(frozen=True, eq=False, repr=False)
class RetrainSettings:
    """The options of one training run, complete and checked."""

    iterations: int = 500
    loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    decay: Decay = "constant"
    every: int = 50
    teacher: nn.Module | None = None
    seed: int = 0
    evaluate: Score | None = None
    until_score: float | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.iterations, Integral) and isinstance(self.every, Integral)
        if not whole or self.iterations < 0 or self.every < 1:
            raise TrainingError(
                f"iterations = {self.iterations!r}, every = {self.every!r}: train for 0 or more, "
                "and evaluate every 1 or more."
            )
        if self.decay not in list(DECAYS):
            raise TrainingError(f"decay is '{self.decay}': use {', '.join(DECAYS)}.")
        if self.until_score is not None and self.evaluate is None:
            raise TrainingError(
                "until_score needs evaluate: a function of a network that returns its score, "
                "larger is better."
            )
        made = self.optimizer
        if made is not None and (not callable(made) or isinstance(made, torch.optim.Optimizer)):
            raise TrainingError(
                f"optimizer is a {type(made).__name__}: give a function that makes one, such as "
                "lambda parameters: torch.optim.SGD(parameters, 0.01), since the network is "
                "trained as a copy."
            )

    @property
    def rate(self) -> Callable[[float], float]:
        """Learning-rate factor by the finished fraction of the iterations."""
        return DECAYS[self.decay]


_REMOVED = {
    "checkpoint": "execution=lobs.Execution(resume=…), a folder",
    "folder": "execution=lobs.Execution(resume=…)",
    "until_error": "until_score=…; evaluate returns a score, larger is better",
}


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options that `retrain` does not have, and name the right ones."""
    known = RetrainOptions.__annotations__
    for name in given:
        if name not in known:
            remedy = _REMOVED.get(name, f"one of {', '.join(known)}")
            raise TypeError(f"there is no option '{name}': say {remedy}.")


def check_execution(execution: Execution | None, where: str, *allowed: str) -> Execution:
    """Return the execution options; refuse fields that mean nothing here.

    Args:
        execution: as the user gave it; None stands for the defaults.
        where: the function's name.
        *allowed: the fields that it honours.
    """
    chosen = Execution() if execution is None else execution
    if not isinstance(chosen, Execution):
        raise TrainingError(f"execution is {execution!r}: give lobs.Execution(resume=…, …).")
    for field in fields(Execution):
        value = getattr(chosen, field.name)
        if field.name not in allowed and value != field.default:
            raise TrainingError(
                f"{where} does not support Execution({field.name}={value!r}): leave it out. It "
                f"supports {' and '.join(allowed)}."
            )
    return chosen


def check_inputs(masks: Mapping[str, Tensor], data: Iterable[Any]) -> None:
    """Refuse masks that are not a mapping, and data that can be read only once."""
    if not isinstance(masks, Mapping):
        raise TrainingError(
            f"masks is a {type(masks).__name__}: give a mapping of masks by parameter name, such "
            "as PruningResult.masks."
        )
    check_repeatable(data)


def check_repeatable(data: Iterable[Any]) -> None:
    """Refuse data that can be read only once."""
    if isinstance(data, Iterator):
        raise TrainingError(
            f"data is a {type(data).__name__}, and training reads it many times: give a list, a "
            "DataLoader or Shuffled."
        )
