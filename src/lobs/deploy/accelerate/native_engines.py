"""Engines of the generated kernels: bit masks and slots for few inputs, planes for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lobs.deploy.accelerate.engines import Engine, bias_of, weight_matrix
from lobs.deploy.accelerate.native import (
    MOST_SAMPLES,
    BitMatrix,
    PlaneMatrix,
    SlotMatrix,
    Storage,
    add_planes,
    block_of,
    multiply,
    multiply_slots,
    turned,
)

_PANEL = 2**20  # weights that are dense at a time, for more than 16 inputs


class PackedEngine(Engine):
    """An engine that can do without the dense weights."""

    matrix: BitMatrix | SlotMatrix | PlaneMatrix

    @property
    def nbytes(self) -> int:
        """Number of bytes of the packed weights."""
        return self.matrix.nbytes

    def release(self) -> None:
        """Forget the layers: their weights will not be there."""
        self.layers, self.watched, self.version = [], [], 0


class BitmaskEngine(PackedEngine):
    """Compute up to 16 inputs from bit masks and packed weights.

    Several layers that read the same input are one matrix. Their outputs lie side by side.
    """

    name = "bitmask"
    matrix: BitMatrix | SlotMatrix

    def __init__(
        self, layers: Sequence[nn.Module], example: Tensor, storage: Storage = "float32"
    ) -> None:
        self.storage = storage
        super().__init__(layers, example)

    def prepare(self) -> None:
        """Pack the weights."""
        weights = [weight_matrix(layer) for layer in self.layers]
        self.matrix = self.packed(torch.cat(weights))
        self.bias = torch.cat([torch.from_numpy(bias_of(layer)) for layer in self.layers])
        self.features = self.matrix.shape[1]

    def packed(self, weight: Tensor) -> BitMatrix | SlotMatrix:
        """Return the packed form of a weight."""
        return BitMatrix.pack(weight, self.storage)

    def product(self, x: Tensor, rows: tuple[int, int] | None) -> Tensor:
        """Return the outputs of up to 16 inputs, of all rows or of some."""
        assert isinstance(self.matrix, BitMatrix)
        return multiply(self.matrix, x, self.bias, rows)

    def fits(self, x: Tensor) -> bool:
        """Return whether there are at most 16 inputs with features last."""
        return x.shape[-1:] == (self.features,) and x.numel() <= MOST_SAMPLES * self.features

    def run(self, x: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
        """Expand the weights in registers; for more than 16 inputs into dense panels of rows.

        Args:
            x: the inputs.
            rows: the first row to compute, and the row after the last; all by default.
        """
        flat = x.detach().reshape(-1, self.features)
        if len(flat) <= MOST_SAMPLES:
            return self.product(flat, rows).view(*x.shape[:-1], -1)
        first, last = (0, self.matrix.shape[0]) if rows is None else rows
        out = torch.empty(len(flat), last - first)
        step = max(1, _PANEL // max(1, self.features))
        for low in range(first, last, step):
            high = min(last, low + step)
            part = torch.addmm(self.bias[low:high], flat, self.matrix.dense(low, high).T)
            out[:, low - first : high - first] = part
        return out.view(*x.shape[:-1], -1)

    def dense(self, rows: tuple[int, int]) -> Tensor:
        """Return rows of the weight."""
        return self.matrix.dense(*rows)

    def write(self, rows: tuple[int, int], weight: Tensor, bias: Tensor | None) -> None:
        """Replace rows of the weight and the bias, once dense weights are released.

        Args:
            rows: the first row, and the row after the last.
            weight: the new rows.
            bias: their bias.
        """
        whole = self.matrix.dense()
        whole[slice(*rows)] = weight
        self.matrix = self.packed(whole)
        if bias is not None:
            self.bias[slice(*rows)] = bias.detach()


class SlotsEngine(BitmaskEngine):
    """Compute up to 16 inputs where few weights are kept: 16 rows side by side."""

    name = "slots"

    def packed(self, weight: Tensor) -> BitMatrix | SlotMatrix:
        """Return the packed form of a weight."""
        return SlotMatrix.pack(weight, self.storage)

    def product(self, x: Tensor, rows: tuple[int, int] | None) -> Tensor:
        """Return the outputs of up to 16 inputs, of all rows or of some."""
        assert isinstance(self.matrix, SlotMatrix)
        return multiply_slots(self.matrix, x, self.bias, rows)


class PlanesEngine(PackedEngine):
    """Compute many inputs: each weight adds its feature of all inputs, times its value."""

    name = "planes"
    matrix: PlaneMatrix

    def prepare(self) -> None:
        """Collect the rows of weights."""
        weight = weight_matrix(self.layers[0])
        self.matrix = PlaneMatrix.pack(weight, block_of(weight))
        self.bias = torch.from_numpy(bias_of(self.layers[0]))
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
        add_planes(self.matrix, turned(flat), out, self.bias, span=samples, pitch=samples)
        return turned(out).view(*x.shape[:-1], rows)

    def dense(self, rows: tuple[int, int]) -> Tensor:
        """Return rows of the weight."""
        return self.matrix.dense()[slice(*rows)]

    def write(self, rows: tuple[int, int], weight: Tensor, bias: Tensor | None) -> None:
        """Replace the weight and the bias, once dense weights are released.

        Args:
            rows: all rows.
            weight: the new rows.
            bias: their bias.
        """
        self.matrix = PlaneMatrix.pack(weight, block_of(weight))
        if bias is not None:
            self.bias = bias.detach().clone()
