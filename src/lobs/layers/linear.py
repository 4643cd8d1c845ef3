"""Linear maps of the last dimension: `nn.Linear`, and Hugging Face's `Conv1D`, which is one with its weight transposed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import Tensor, nn

from lobs.errors import CalibrationError
from lobs.layers.base import PIECE_ELEMENTS, PIECE_ROWS, Layer


class LinearLayer(Layer):
    """`nn.Linear`, with inputs of any leading shape."""

    def check_input(self, x: Tensor) -> None:
        """The last dimension must fit."""
        if x.dim() == 0 or x.shape[-1] != self.columns or not x.is_floating_point():
            raise CalibrationError(
                f"layer '{self.name}' takes floating-point inputs of {self.columns} features, but "
                "was given "
                f"{x.dtype} of shape {tuple(x.shape)}. In a tuple the input comes first."
            )

    @property
    def groups(self) -> int:
        """Always one."""
        return 1

    @property
    def form(self) -> Hashable:
        """All that map rows of the weight to outputs are alike."""
        return "linear"

    def unfolded(self, weight: Tensor) -> Tensor:
        """The weight is the matrix."""
        return weight.unsqueeze(0)

    def folded(self, matrix: Tensor) -> Tensor:
        """The matrix is the weight."""
        return matrix.squeeze(0)

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Rows of the input are the patches."""
        flat = x.reshape(-1, self.columns)
        piece = max(1, min(PIECE_ROWS, PIECE_ELEMENTS * 4 // max(1, self.columns)))
        for start in range(0, len(flat), piece):
            yield flat[start : start + piece].unsqueeze(0)

    def vectors(self, x: Tensor) -> int:
        """As many as there are rows."""
        return x.numel() // max(1, self.columns)

    def by_unit(self, z: Tensor) -> Tensor:
        """Output units are the last dimension."""
        return z.reshape(-1, self.rows).sum(dim=0).unsqueeze(0)


class FlippedLinearLayer(LinearLayer):
    """`transformers.pytorch_utils.Conv1D` of GPT-2 and its kin: inputs along the weight's first dimension."""

    @property
    def columns(self) -> int:
        """Inputs come first in the weight."""
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        """Outputs come second."""
        return self.weight.shape[1]

    @property
    def form(self) -> Hashable:
        """Not to be confused with a square Linear."""
        return "flipped linear"

    def unfolded(self, weight: Tensor) -> Tensor:
        """Transpose."""
        return weight.mT.unsqueeze(0)

    def folded(self, matrix: Tensor) -> Tensor:
        """Transpose back."""
        return matrix.squeeze(0).mT


def flipped_linear_class(module: nn.Module) -> type | None:
    """The `Conv1D` that a module is, found without importing transformers."""
    classes = [
        c
        for c in type(module).__mro__
        if c.__name__ == "Conv1D" and c.__module__.startswith("transformers.")
    ]
    return classes[0] if classes else None
