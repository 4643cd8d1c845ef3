"""Engines made of torch alone: its sparse formats, and dense layers without empty rows."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from lobs.deploy.accelerate.engines import Engine


class CsrEngine(Engine):
    """Compute with torch's compressed sparse rows."""

    name = "csr"

    def prepare(self) -> None:
        """Convert the weight to a sparse tensor."""
        with warnings.catch_warnings():
            # torch announces once that its sparse formats are in beta.
            warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta", UserWarning)
            self.weight = self.compress(self.layers[0].weight.detach())
        self.bias = self.layers[0].bias

    def compress(self, weight: Tensor) -> Tensor:
        """Return the weight as compressed rows."""
        return weight.to_sparse_csr()

    def run(self, x: Tensor) -> Tensor:
        """Multiply sparse by dense, transposed twice."""
        out = (self.weight @ x.detach().reshape(-1, x.shape[-1]).T).T
        out = out if self.bias is None else out + self.bias.detach()
        return out.reshape(*x.shape[:-1], -1)


class BsrEngine(CsrEngine):
    """Compute with torch's compressed rows of blocks, for zeros that come in blocks."""

    name = "bsr"
    block = 16

    def compress(self, weight: Tensor) -> Tensor:
        """Return the weight as compressed rows of blocks."""
        return weight.to_sparse_bsr((self.block, self.block))

    @classmethod
    def suits(cls, weight: Tensor) -> bool:
        """Return whether blocks divide the matrix and at least a third of them are empty."""
        rows, columns = weight.shape
        if rows % cls.block or columns % cls.block:
            return False
        blocks = weight.detach().reshape(
            rows // cls.block, cls.block, columns // cls.block, cls.block
        )
        return float((blocks != 0).any(dim=3).any(dim=1).float().mean()) < 2 / 3


class ShrunkEngine(Engine):
    """Compute densely without empty rows and columns (channels of a convolution)."""

    name = "shrunk"

    def prepare(self) -> None:
        """Select the rows and columns that are not empty."""
        layer = self.layers[0]
        weight = layer.weight.detach()
        self.rows, self.columns = _nonempty(weight)
        self.weight = weight[self.rows][:, self.columns].contiguous()
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.axis = 1 if isinstance(layer, nn.Conv2d) else -1
        self.all_rows, self.all_columns = (
            len(self.rows) == len(weight),
            len(self.columns) == weight.shape[1],
        )

    def fits(self, x: Tensor) -> bool:
        """Return whether the input has features last, or is a batch of images."""
        if self.axis == 1:
            return x.dim() == 4 and x.shape[1] == self.layers[0].weight.shape[1]
        return super().fits(x)

    def run(self, x: Tensor) -> Tensor:
        """Select the used inputs, compute, and scatter the outputs."""
        layer, part = self.layers[0], x.detach()
        if not self.all_columns:
            part = part.index_select(self.axis, self.columns)
        bias = self.bias if self.bias is None or self.all_rows else self.bias[self.rows]
        if isinstance(layer, nn.Conv2d):
            out = nn.functional.conv2d(
                part, self.weight, bias, layer.stride, layer.padding, layer.dilation
            )
        else:
            out = nn.functional.linear(part, self.weight, bias)
        if self.all_rows:
            return out
        shape = list(out.shape)
        shape[self.axis] = len(layer.weight)
        whole = out.new_zeros(shape)
        if self.bias is not None:
            whole += self.bias.view(-1, 1, 1) if self.axis == 1 else self.bias
        return whole.index_copy_(self.axis, self.rows, out)

    @classmethod
    def suits(cls, layer: nn.Linear | nn.Conv2d) -> bool:
        """Return whether at least a twentieth of the rows or columns is empty."""
        if isinstance(layer, nn.Conv2d) and (layer.groups > 1 or layer.padding_mode != "zeros"):
            return False
        rows, columns = _nonempty(layer.weight.detach())
        return len(rows) < 0.95 * len(layer.weight) or len(columns) < 0.95 * layer.weight.shape[1]


def _nonempty(weight: Tensor) -> tuple[Tensor, Tensor]:
    there = (weight != 0).reshape(len(weight), weight.shape[1], -1).any(dim=2)
    return there.any(dim=1).nonzero().flatten(), there.any(dim=0).nonzero().flatten()
