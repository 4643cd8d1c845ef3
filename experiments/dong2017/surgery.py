"""Dynamic network surgery (DNS; Guo, Yao, Chen 2016): masks are redrawn while the network trains.

Each layer has two thresholds, a < b, around mean + c·deviation of its dense |w|. A weight below a
is cut. A weight above b is spliced back. Between them the mask stays as it is.

The forward pass uses the masked weights. All weights learn from the gradient at the masked ones,
so a cut weight can come back. Masks are redrawn with a probability that falls during training.
They are frozen in its last part.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.calibration.forward import call
from lobs.errors import TrainingError
from lobs.layers import Layer, find_layers
from lobs.solvers.solution import joined
from lobs.training.objectives import Loss, MakeOptimizer, sgd


@dataclass(frozen=True)
class Surgery:
    """Hold thresholds and schedule.

    Thresholds are (1 ∓ margin)·(mean + c·deviation). Masks are redrawn with probability
    (1 + gamma·iteration)^(−power). `decay` maps the fraction of training to a factor of the
    learning rate.
    """

    c: float | Mapping[str, float]
    margin: float = 0.1
    gamma: float = 1e-4
    power: float = 1.0
    freeze_after: float = 0.75  # the fraction of training after which masks are frozen
    decay: Callable[[float], float] = lambda t: 1.0

    def thresholds(self, name: str, weight: Tensor) -> tuple[float, float]:
        """Return (a, b) of a layer, from its dense weights."""
        c = self.c[name] if isinstance(self.c, Mapping) else self.c
        size = weight.detach().abs()
        middle = max(float(size.mean() + c * size.std()), 0.0)
        return (1 - self.margin) * middle, (1 + self.margin) * middle

    def probability(self, iteration: int) -> float:
        """Return the probability that masks are redrawn at an iteration."""
        return float((1 + self.gamma * iteration) ** -self.power)


def redraw(weight: Tensor, mask: Tensor, a: float, b: float) -> Tensor:
    """Cut weights below a, splice back those from b on, keep the mask between.

    >>> redraw(torch.tensor([0.1, -0.5, 0.5, -0.9]), torch.tensor([True, True, False, False]), 0.4, 0.6).tolist()
    [False, True, False, True]
    """
    size = weight.detach().abs()
    return torch.where(size < a, False, torch.where(size >= b, True, mask))


def threshold_c(weight: Tensor, kept: float) -> float:
    """Return the c whose threshold keeps this fraction of the dense weights.

    Training then moves the magnitudes, so the fraction is a start only.
    """
    size = weight.detach().abs().flatten()
    cut = size.sort().values[min(len(size) - 1, int((1 - kept) * len(size)))]
    return float((cut - size.mean()) / size.std())


@dataclass(frozen=True, eq=False)
class Operated:
    """Hold a network after surgery: masked weights and masks by parameter name.

    `history` lists (iteration, error, kept fraction).
    """

    model: nn.Module
    masks: dict[str, Tensor]
    iterations: int
    history: tuple[tuple[int, float, float], ...]
    seconds: float

    @property
    def kept_fraction(self) -> float:
        """Return kept weights over all weights of the layers operated on."""
        return sum(int(m.sum()) for m in self.masks.values()) / sum(
            m.numel() for m in self.masks.values()
        )


def operate(
    model: nn.Module,
    data: Iterable[Any],
    rule: Surgery,
    *,
    iterations: int,
    loss: Loss = F.cross_entropy,
    optimizer: MakeOptimizer | None = None,
    layers: str | Iterable[str] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    every: int = 1000,
    seed: int = 0,
) -> Operated:
    """Train and prune at once by dynamic network surgery; `model` is untouched.

    Args:
        model: the dense network.
        data: batches of (input, label), repeated until the iterations are done.
        rule: thresholds and schedule.
        iterations: number of optimiser steps.
        loss: a function of (outputs, labels).
        optimizer: makes an optimiser from a list of parameters; `sgd()` by default.
        layers: names or globs; all that `lobs` can prune by default.
        evaluate: an error, measured every `every` iterations and at the end.
        every: iterations between two measurements.
        seed: seed of the data order, of dropout and of the redrawing.
    """
    if isinstance(data, Iterator):
        raise TrainingError(
            "data is a generator, which ends after one pass: pass a list, a DataLoader or Shuffled."
        )
    work = copy.deepcopy(model)
    patient = _Patient(find_layers(work, layers), rule)
    optimiser = (optimizer or sgd())([p for p in work.parameters() if p.requires_grad])
    rates = [group["lr"] for group in optimiser.param_groups]
    history: list[tuple[int, float, float]] = []
    began = time.perf_counter()
    work.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for t, batch in enumerate(_forever(data, iterations)):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * rule.decay(t / iterations)
            if t < rule.freeze_after * iterations and float(torch.rand(())) < rule.probability(t):
                patient.redraw()
            with patient.masked():
                value = loss(call(work, batch), batch[1])
                optimiser.zero_grad()
                value.backward()  # type: ignore[no-untyped-call]
            optimiser.step()  # on the dense weights, with the gradient at the masked ones
            if evaluate is not None and ((t + 1) % every == 0 or t + 1 == iterations):
                with patient.masked(), torch.random.fork_rng(devices=[]):
                    history.append((t + 1, float(evaluate(work)), patient.kept_fraction))
    patient.close()
    return Operated(
        work.eval(), patient.named_masks(), iterations, tuple(history), time.perf_counter() - began
    )


def _forever(data: Iterable[Any], iterations: int) -> Iterator[Any]:
    left = iterations
    while left > 0:
        before = left
        for batch in data:
            if left == 0:
                return
            left -= 1
            yield batch
        if left == before:
            raise TrainingError("there are no batches to train on: the data is empty.")


class _Patient:
    """Hold the layers under surgery: dense weights in the module, masks beside them."""

    def __init__(self, layers: list[Layer], rule: Surgery) -> None:
        if isinstance(rule.c, Mapping):
            missing = [layer.name for layer in layers if layer.name not in rule.c]
            if missing:
                raise TrainingError(
                    f"layer '{missing[0]}' has no c. Give one for every layer, or choose layers."
                )
        self.layers = layers
        self.masks = [torch.ones_like(layer.weight, dtype=torch.bool) for layer in layers]
        self.thresholds = [rule.thresholds(layer.name, layer.weight) for layer in layers]

    @property
    def kept_fraction(self) -> float:
        return sum(int(m.sum()) for m in self.masks) / sum(m.numel() for m in self.masks)

    def redraw(self) -> None:
        triples = zip(self.layers, self.masks, self.thresholds, strict=True)
        self.masks = [redraw(layer.weight, mask, a, b) for layer, mask, (a, b) in triples]

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Mask the weights inside the block and restore the dense ones after it."""
        dense = [layer.weight.detach().clone() for layer in self.layers]
        self.close()
        try:
            yield
        finally:
            with torch.no_grad():
                for layer, weight in zip(self.layers, dense, strict=True):
                    layer.weight.copy_(weight)

    @torch.no_grad()
    def close(self) -> None:
        """Apply the masks."""
        for layer, mask in zip(self.layers, self.masks, strict=True):
            layer.weight.masked_fill_(~mask, 0)

    def named_masks(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for layer, mask in zip(self.layers, self.masks, strict=True):
            matrix = layer.unfolded(mask)
            free = torch.ones_like(matrix[..., :1])  # the bias, where there is one
            named = joined(named, layer.masks(torch.cat([matrix, free], dim=-1)))
        return named
