"""Prune a network layer by layer with a rival: each layer on the inputs that earlier ones give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.admm import admm
from benchmarks.baselines.column_sweep import column_sweep
from lobs.calibration.blocks import in_blocks, layers_of
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


RIVALS: dict[str, Rival] = {"Wanda": wanda, "SparseGPT": sparsegpt, "ADMM": alps}


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
        for layer, moments in layers_of(block):
            assert moments is not None
            d = layer.columns
            matrix, moment = layer.matrix(), moments.pruned.moment
            for group, own in zip(matrix, moment, strict=True):
                group[:, :d] = RIVALS[rival](
                    group[:, :d].float(), own[:d, :d], sparsity, pattern
                ).to(group)
            layer.write(matrix)
    return pruned
