"""Engines of the generated kernels: bit masks for few inputs, planes for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lobs.deploy.accelerate.engines import Engine, bias_of, weight_matrix
from lobs.deploy.accelerate.native import (
    MOST_SAMPLES,
    BitMatrix,
    PlaneMatrix,
    Storage,
    add_planes,
    block_of,
    multiply,
    turned,
)


class BitmaskEngine(Engine):
    """Compute up to 16 inputs from bit masks and packed weights.

    Several layers that read the same input are one matrix. Their outputs lie side by side.
    """

    name = "bitmask"

    def __init__(
        self, layers: Sequence[nn.Module], example: Tensor, storage: Storage = "float32"
    ) -> None:
        self.storage = storage
        super().__init__(layers, example)

    def prepare(self) -> None:
        """Pack the weights."""
        weights = [weight_matrix(layer) for layer in self.layers]
        self.matrix = BitMatrix.pack(torch.cat(weights), self.storage)
        self.bias = np.concatenate([bias_of(layer) for layer in self.layers])
        self.features = self.matrix.shape[1]

    def fits(self, x: Tensor) -> bool:
        """Return whether there are at most 16 inputs with features last."""
        return x.shape[-1:] == (self.features,) and x.numel() <= MOST_SAMPLES * self.features

    def run(self, x: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
        """Expand the weights in registers.

        Args:
            x: the inputs.
            rows: the first row to compute, and the row after the last; all by default.
        """
        flat = x.detach().reshape(-1, self.features)
        return multiply(self.matrix, flat, self.bias, rows).view(*x.shape[:-1], -1)


class PlanesEngine(Engine):
    """Compute many inputs: each weight adds its feature of all inputs, times its value."""

    name = "planes"

    def prepare(self) -> None:
        """Collect the rows of weights."""
        weight = weight_matrix(self.layers[0])
        self.matrix = PlaneMatrix.pack(weight, block_of(weight))
        self.bias: Any = bias_of(self.layers[0])
        self.features = self.matrix.shape[1]

    def fits(self, x: Tensor) -> bool:
        """Return whether features are last."""
        return x.shape[-1:] == (self.features,)

    def run(self, x: Tensor) -> Tensor:
        """Transpose, add planes, transpose back."""
        flat = x.detach().reshape(-1, self.features)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        samples, rows = len(flat), self.matrix.shape[0]
        out = torch.empty(rows, samples)
        add_planes(self.matrix, turned(flat), out, self.bias, span=samples, apart=samples)
        return turned(out).view(*x.shape[:-1], rows)
