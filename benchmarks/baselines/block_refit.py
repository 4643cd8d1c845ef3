"""ADMM for the layers, then Adam on each block: the strongest published pipeline that we know of.

A block's layers are pruned by ADMM as in `sequential`. Then all its kept weights, biases and norm
gains move by Adam, so that the block's output on pruned inputs comes nearer to the dense block's
(EBFT: Guo et al. 2024, as we read it: mean squared error, a fixed rate, about ten epochs).
Published pipelines hold no sample out, so every sample fits here too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.sequential import solve_layers
from lobs.calibration.blocks import Repeated, flowing, loaded, repeated_blocks
from lobs.calibration.forward import evaluating
from lobs.layers import find_layers


@dataclass(frozen=True)
class Adam:
    """How blocks are refitted.

    Args:
        epochs: passes over the samples.
        rate: the learning rate; it falls to zero along half a cosine.
        rows: sequences of one step.
    """

    epochs: int = 10
    rate: float = 2e-4
    rows: int = 4


def admm_and_refit(
    model: nn.Module,
    batches: Iterable[Any],
    sparsity: float,
    pattern: tuple[int, int] | None = None,
    skip: str | Iterable[str] = (),
    adam: Adam | None = None,
) -> nn.Module:
    """Return a pruned copy of a decoder or encoder.

    Args:
        model: the network.
        batches: what calibrates.
        sparsity: fraction of each layer that goes.
        pattern: n and m, in place of a fraction.
        skip: layers that stay dense.
        adam: how blocks are refitted.
    """
    pruned = copy.deepcopy(model)
    pairs = list(zip(find_layers(model, skip=skip), find_layers(pruned, skip=skip), strict=True))
    with evaluating(model), evaluating(pruned):
        for block in repeated_blocks(model, pruned, batches, pairs) or []:
            solve_layers(block, "ADMM", sparsity, pattern)
            if isinstance(block, Repeated):
                refit(block, adam or Adam())
            block.advance()
    return pruned


def refit(block: Repeated, adam: Adam) -> None:
    """Move the kept weights of a block toward its dense output; zeros stay."""
    masks = {after.weight: after.weight != 0 for _, after in block.layers}
    free = [p for p in block.module.parameters() if p in masks or p.dim() == 1]
    for parameter in block.module.parameters():
        parameter.requires_grad_(any(parameter is p for p in free))
    samples = block.samples()
    pieces = [
        (i, slice(row, row + adam.rows))
        for i, sample in enumerate(samples)
        for row in range(0, sample.inputs.shape[0], adam.rows)
    ]
    optimizer, generator = torch.optim.Adam(free, lr=adam.rate), torch.Generator().manual_seed(0)
    steps = adam.epochs * len(pieces)
    for step in range(steps):
        if step % len(pieces) == 0:
            order = torch.randperm(len(pieces), generator=generator).tolist()
        index, rows = pieces[order[step % len(pieces)]]
        sample = samples[index]
        arguments = sample.arguments.rows(rows, sample.inputs.shape[0])
        optimizer.param_groups[0]["lr"] = adam.rate * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        with torch.enable_grad():
            out = flowing(arguments.run(block.module, loaded(sample.inputs[rows]).clone()))
            assert isinstance(out, Tensor)
            (out - loaded(sample.wanted[rows])).square().mean().backward()
        for parameter, mask in masks.items():
            if parameter.grad is not None:
                parameter.grad.mul_(mask)
        optimizer.step()
    for parameter in block.module.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
