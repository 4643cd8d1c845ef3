"""Train a zoo network from scratch, and measure its error rate."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim.lr_scheduler import LRScheduler

from lobs._system.progress import Advance, shown, track
from lobs.calibration.forward import evaluating
from lobs.storage.atomic import make_folder
from lobs.storage.train_state import TrainingState
from lobs.zoo.datasets.labelled import LabelledImages


@dataclass(frozen=True)
class Recipe:
    """Nesterov momentum with a cosine learning rate, after `warm_up` epochs of a linear rise.

    `input_dropout` is the share of pixels set to zero in training. `augment` shifts every image by
    up to four pixels and mirrors half of them.
    """

    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float = 0.0
    momentum: float = 0.9
    input_dropout: float = 0.0
    warm_up: int = 0
    augment: bool = False

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """Return the optimiser of the recipe, at its highest rate."""
        rate, decay = self.learning_rate, self.weight_decay
        return torch.optim.SGD(
            parameters, rate, momentum=self.momentum, weight_decay=decay, nesterov=True
        )


def train(
    model: nn.Module,
    data: LabelledImages,
    recipe: Recipe,
    *,
    seed: int = 0,
    progress: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Train in place and return the network.

    The same seed on the same machine gives the same weights.

    Args:
        model: the network.
        data: training images and labels.
        recipe: how to train.
        seed: seed of the order of the data and of dropout.
        progress: show progress.
        resume: a folder that gets the training state after every epoch. A run that finds its state
            there continues from it.
    """
    file = None if resume is None else make_folder(resume) / "training.safetensors"
    steps = len(data) // recipe.batch_size
    optimiser = recipe.optimizer(model.parameters())
    schedule = _schedule(optimiser, recipe, steps)
    settings = {**asdict(recipe), "seed": seed}
    model.train()
    with (
        shown(progress),
        track("train", recipe.epochs * steps) as advance,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)  # dropout draws from the global generator
        generator = torch.Generator().manual_seed(seed)
        run = TrainingState(model, optimiser, generator, schedule, {"epoch": 0})
        if file is not None:
            run.load(file, settings)
        advance(run.counters["epoch"] * steps)
        while run.counters["epoch"] < recipe.epochs:
            _epoch(run, data, recipe, advance)
            run.counters["epoch"] += 1
            if file is not None:
                run.save(file, settings)
    return model.eval()


def _epoch(run: TrainingState, data: LabelledImages, recipe: Recipe, advance: Advance) -> None:
    order = torch.randperm(len(data), generator=run.generator)
    for start in range(0, len(data) - recipe.batch_size + 1, recipe.batch_size):
        pick = order[start : start + recipe.batch_size]
        images = (
            augmented(data.images[pick], run.generator) if recipe.augment else data.images[pick]
        )
        loss = F.cross_entropy(
            run.model(F.dropout(images, recipe.input_dropout)), data.labels[pick]
        )
        run.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        assert isinstance(run.schedule, LRScheduler)
        run.schedule.step()
        advance(1)


def _schedule(optimiser: torch.optim.Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    total, rise = max(recipe.epochs * steps, 1), recipe.warm_up * steps
    if not rise:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)

    def factor(step: int) -> float:
        return (
            (step + 1) / rise
            if step < rise
            else 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (total - rise))
        )

    return torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


def augmented(images: Tensor, generator: torch.Generator, shift: int = 4) -> Tensor:
    """Return every image shifted by up to `shift` pixels and mirrored half of the time."""
    n, _, high, wide = images.shape
    padded = F.pad(images, [shift] * 4)
    top, left = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
    rows, columns = top + torch.arange(high), left + torch.arange(wide)
    mirror = torch.randint(0, 2, (n, 1), generator=generator).bool()
    columns = torch.where(mirror, columns.flip(1), columns)
    picked = padded[torch.arange(n).view(n, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2)


def error_rate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of wrong answers, in percent."""
    wrong, total = 0, 0
    with evaluating(model):
        for x, y in batches:
            wrong += int((model(x).argmax(dim=1) != y).sum())
            total += len(y)
    return 100.0 * wrong / max(total, 1)
