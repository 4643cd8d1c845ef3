"""Prune a network layer by layer with a rival: each layer on the inputs that earlier ones give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.admm import admm
from benchmarks.baselines.column_sweep import column_sweep
from lobs.calibration.blocks import Block, in_blocks, layers_of
from lobs.layers import find_layers

Rival = Callable[[Tensor, Tensor, float, tuple[int, int] | None], Tensor]


def wanda(
    weight: Tensor, moment: Tensor, sparsity: float, pattern: tuple[int, int] | None
) -> Tensor:
    """Keep the largest |w|·‖x‖ of every row, or of every group; nothing is compensated."""
    scores = weight.abs() * moment.diagonal().sqrt()
    n, m = pattern or (weight.shape[1] - round(sparsity * weight.shape[1]), weight.shape[1])
    groups = scores.view(len(weight), -1, m)
    kept = torch.zeros_like(groups).scatter(-1, groups.topk(n, dim=-1).indices, 1.0)
    return weight * kept.view_as(weight)


def sparsegpt(
    weight: Tensor, moment: Tensor, sparsity: float, pattern: tuple[int, int] | None
) -> Tensor:
    """Sweep the columns with the published damping."""
    return column_sweep(weight, moment, None if pattern else sparsity, pattern)


def alps(
    weight: Tensor, moment: Tensor, sparsity: float, pattern: tuple[int, int] | None
) -> Tensor:
    """Run ADMM with the published settings."""
    return admm(weight, moment.float(), sparsity, pattern=pattern)


def magnitude(
    weight: Tensor, moment: Tensor, sparsity: float, pattern: tuple[int, int] | None
) -> Tensor:
    """Keep the largest weights of the layer, or of every group; the data count nothing."""
    n, m = pattern or (weight.numel() - round(sparsity * weight.numel()), weight.numel())
    groups = weight.abs().reshape(-1, m)
    kept = torch.zeros_like(groups).scatter(-1, groups.topk(n, dim=-1).indices, 1.0)
    return weight * kept.view_as(weight)


RIVALS: dict[str, Rival] = {
    "magnitude": magnitude,
    "Wanda": wanda,
    "SparseGPT": sparsegpt,
    "ADMM": alps,
}


def pruned_by(
    rival: str,
    model: nn.Module,
    batches: Iterable[Any],
    sparsity: float,
    pattern: tuple[int, int] | None = None,
    skip: str | Iterable[str] = (),
) -> nn.Module:
    """Return a pruned copy of a network.

    Biases stay as they are, as in the published methods.
    """
    pruned = copy.deepcopy(model)
    pairs = list(zip(find_layers(model, skip=skip), find_layers(pruned, skip=skip), strict=True))
    for block in in_blocks(model, pruned, batches, pairs):
        solve_layers(block, rival, sparsity, pattern)
    return pruned


def solve_layers(
    block: Block, rival: str, sparsity: float, pattern: tuple[int, int] | None
) -> None:
    """Prune the layers of a block in place, in running order.

    Args:
        block: the block.
        rival: a name of `RIVALS`.
        sparsity: fraction of each layer that goes.
        pattern: n and m, in place of a fraction.
    """
    for layer, moments in layers_of(block):
        assert moments is not None
        d = layer.columns
        matrix, moment = layer.matrix(), moments.pruned.moment
        for group, own in zip(matrix, moment, strict=True):
            group[:, :d] = RIVALS[rival](group[:, :d].float(), own[:d, :d], sparsity, pattern).to(
                group
            )
        layer.write(matrix)
