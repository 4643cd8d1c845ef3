"""Ready-made parts of a training run: shuffled batches, a distillation loss, an optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.errors import TrainingError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False, repr=False)
class Shuffled:
    """Yield inputs and labels as batches, in a new random order at every pass.

    The order is drawn from torch's generator. A last batch that would be short is left out.

    Args:
        inputs: the samples, along the first dimension.
        labels: one label for each sample.
        batch_size: samples in a batch.
    """

    inputs: Tensor
    labels: Tensor
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.batch_size <= len(self.inputs) or len(self.inputs) != len(self.labels):
            raise TrainingError(
                f"{len(self.inputs)} inputs and {len(self.labels)} labels do not make batches of "
                f"{self.batch_size}: give as many labels as inputs, and batches no larger than the "
                "data."
            )

    def __repr__(self) -> str:
        return f"Shuffled({len(self.inputs):,} samples, batch_size={self.batch_size})"

    def __len__(self) -> int:
        return len(self.inputs) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.inputs))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            pick = order[start : start + self.batch_size]
            yield self.inputs[pick], self.labels[pick]


def distillation(temperature: float = 2.0) -> Loss:
    """Return a loss: the Kullback–Leibler divergence from softened teacher outputs, times T²."""

    def loss(outputs: Tensor, teacher: Tensor) -> Tensor:
        student, wanted = (F.log_softmax(z / temperature, dim=1) for z in (outputs, teacher))
        return F.kl_div(student, wanted, reduction="batchmean", log_target=True) * temperature**2

    return loss


def sgd(
    learning_rate: float = 0.05, momentum: float = 0.9, weight_decay: float = 0.0
) -> MakeOptimizer:
    """Return a function that makes SGD with Nesterov momentum, as the zoo's networks were trained.

    Args:
        learning_rate: the rate before any decay.
        momentum: 0 for plain gradient descent.
        weight_decay: the factor of the L2 penalty.
    """
    return lambda parameters: torch.optim.SGD(
        parameters,
        learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=momentum > 0,
    )
