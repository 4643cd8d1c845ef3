"""Train a zoo network from scratch, and tell how often a network is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.calibrate import evaluating
from lobs.data.mnist import LabelledImages
from lobs.progress import shown, track


@dataclass(frozen=True)
class Recipe:
    """Nesterov momentum with a cosine learning rate; `input_dropout` blanks that share of pixels while training."""

    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float = 0.0
    momentum: float = 0.9
    input_dropout: float = 0.0


def train(model: nn.Module, data: LabelledImages, recipe: Recipe, *, seed: int = 0, progress: bool = True) -> nn.Module:
    """Train in place and return the model; the same seed on the same machine gives the same weights."""
    steps = recipe.epochs * (len(data) // recipe.batch_size)
    optimiser = torch.optim.SGD(
        model.parameters(),
        recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with shown(progress), track("train", steps) as advance, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # dropout draws from the global generator
        for _ in range(recipe.epochs):
            order = torch.randperm(len(data), generator=generator)
            for start in range(0, len(data) - recipe.batch_size + 1, recipe.batch_size):
                pick = order[start : start + recipe.batch_size]
                images = F.dropout(data.images[pick], recipe.input_dropout)
                loss = F.cross_entropy(model(images), data.labels[pick])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
                advance(1)
    return model.eval()


def error_rate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of wrong answers, in percent."""
    wrong, total = 0, 0
    with evaluating(model):
        for x, y in batches:
            wrong += int((model(x).argmax(dim=1) != y).sum())
            total += len(y)
    return 100.0 * wrong / max(total, 1)
