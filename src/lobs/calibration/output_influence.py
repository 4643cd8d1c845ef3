"""Estimate how strongly each output unit of a layer moves the network's outputs.

The measure is the mean squared Jacobian, g_i = mean_x Σ_c (∂out_c/∂z_i)², summed over a unit's
positions. With a random ±1 probe v, (vᵀJ_i)² is an unbiased estimate of Σ_c J_ci². One probe per
sample and the mean over samples give g for every unit of every layer at once. The cost is one
forward and one backward pass, whatever the number of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.batches import user_code
from lobs.calibration.forward import (
    batch_size,
    call,
    evaluating,
    length,
    main_output,
    masks_of,
    positions,
)
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching

INFLUENCE_SAMPLES = 64  # of a large network, about; its output influence varies little


def output_influence(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    *,
    seed: int = 0,
    skipped: Sequence[int] = (),
    every: int = 1,
) -> dict[str, Tensor]:
    """Return the mean squared Jacobian by output unit: (groups, rows) per layer, in float64.

    Args:
        model: any network. Without a floating-point tensor in its output all influences are zero.
        batches: calibration batches.
        layers: the layers whose units are wanted.
        seed: seed of the probes.
        skipped: signs that other processes draw before each batch. Every batch then has the same
            signs as in one process.
        every: take one batch in so many.
    """
    total = {
        layer.name: torch.zeros(layer.groups, layer.rows, dtype=torch.float64) for layer in layers
    }
    samples = 0
    generator = torch.Generator().manual_seed(seed)
    with (
        process_group().raise_together(),
        evaluating(model),
        torch.enable_grad(),
        track("influence", length(batches)) as advance,
    ):
        for index, batch in enumerate(batches):
            if index % every:
                advance(1)
                continue
            samples += batch_size(batch)
            if index < len(skipped):
                torch.randint(0, 2, (skipped[index],), generator=generator)
            for layer, gradient in _gradients(model, batch, layers, generator):
                total[layer.name] += layer.by_unit(gradient.to(torch.float64).square()).cpu()
            advance(1)
    process_group().all_reduce(*total.values())
    samples = round(process_group().sum_numbers(samples)[0])
    return {name: value / max(samples, 1) for name, value in total.items()}


def _gradients(
    model: nn.Module, batch: Any, layers: Sequence[Layer], generator: torch.Generator
) -> list[tuple[Layer, Tensor]]:
    """Return the gradients of a randomly signed output, one for each call of a layer.

    Networks that overwrite what a gradient needs run again, with copies of it.
    """
    before = generator.get_state()
    try:
        return _backwards(model, batch, layers, generator)
    except CalibrationError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
    generator.set_state(before)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return _backwards(model, batch, layers, generator)


def _backwards(
    model: nn.Module, batch: Any, layers: Sequence[Layer], generator: torch.Generator
) -> list[tuple[Layer, Tensor]]:
    with _probed(layers) as probes:
        out = main_output(call(model, batch))
    if out is None or not out.requires_grad:  # no layer influences a number in the output
        return []
    signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
    real = positions(out, masks_of(batch))
    if real is not None:
        signs[~real] = 0  # padded positions are no output
    with user_code(
        "going back through the network, as a budget for all of it needs (scope='layer' does not),"
    ):
        # The gradient of a scalar: given signs, torch would import sympy to compare shapes.
        gradients = torch.autograd.grad(
            (out * signs).sum(), [z for _, z in probes], allow_unused=True
        )
    pairs = zip(probes, gradients, strict=True)
    return [(layer, slope) for (layer, _), slope in pairs if slope is not None]


@contextmanager
def _probed(layers: Sequence[Layer]) -> Iterator[list[tuple[Layer, Tensor]]]:
    """Add a zero to every layer's output and return the zeros.

    The gradient of a zero is the gradient of the output, also where weights are frozen.
    """
    probes: list[tuple[Layer, Tensor]] = []

    def probe(layer: Layer, z: Tensor) -> Tensor:
        zero = torch.zeros_like(z, requires_grad=True)
        probes.append((layer, zero))
        return z + zero

    with watching(layer.on_output(partial(probe, layer)) for layer in layers):
        yield probes
