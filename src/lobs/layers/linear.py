"""View linear maps of the last dimension as layers: `nn.Linear`, and Hugging Face's `Conv1D`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import Tensor, nn

from lobs.errors import CalibrationError
from lobs.layers.base import PIECE_ELEMENTS, PIECE_ROWS, Layer


class LinearLayer(Layer):
    """View an `nn.Linear`; its inputs may have any leading shape."""

    def check_input(self, x: Tensor) -> None:
        """Accept inputs whose last dimension fits."""
        if x.dim() == 0 or x.shape[-1] != self.columns or not x.is_floating_point():
            raise CalibrationError(
                f"layer '{self.name}' takes floating-point inputs of {self.columns} features, but "
                f"was given {x.dtype} of shape {tuple(x.shape)}. In a tuple the input comes first."
            )

    @property
    def groups(self) -> int:
        """Return 1."""
        return 1

    @property
    def form(self) -> Hashable:
        """Return one key for all modules whose weight has a row per output."""
        return "linear"

    def unfolded(self, weight: Tensor) -> Tensor:
        """Add the group dimension: the weight is the matrix."""
        return weight.unsqueeze(0)

    def folded(self, matrix: Tensor) -> Tensor:
        """Remove the group dimension."""
        return matrix.squeeze(0)

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the rows of the input."""
        flat = x.reshape(-1, self.columns)
        piece = max(1, min(PIECE_ROWS, PIECE_ELEMENTS * 4 // max(1, self.columns)))
        for start in range(0, len(flat), piece):
            yield flat[start : start + piece].unsqueeze(0)

    def vectors(self, x: Tensor) -> int:
        """Return the number of rows."""
        return x.numel() // max(1, self.columns)

    def by_unit(self, z: Tensor) -> Tensor:
        """Sum all dimensions but the last, which holds the output units."""
        return z.reshape(-1, self.rows).sum(dim=0).unsqueeze(0)


class FlippedLinearLayer(LinearLayer):
    """View a `transformers.pytorch_utils.Conv1D`, as in GPT-2: an `nn.Linear` transposed."""

    @property
    def columns(self) -> int:
        """Return the first dimension of the weight."""
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        """Return the second dimension of the weight."""
        return self.weight.shape[1]

    @property
    def form(self) -> Hashable:
        """Return another key than `nn.Linear`: a square weight must not be mixed up."""
        return "flipped linear"

    def unfolded(self, weight: Tensor) -> Tensor:
        """Transpose, and add the group dimension."""
        return weight.mT.unsqueeze(0)

    def folded(self, matrix: Tensor) -> Tensor:
        """Transpose back."""
        return matrix.squeeze(0).mT


def flipped_linear_class(module: nn.Module) -> type | None:
    """Return the class `Conv1D` of a module, found without importing transformers; else None."""
    classes = [
        c
        for c in type(module).__mro__
        if c.__name__ == "Conv1D" and c.__module__.startswith("transformers.")
    ]
    return classes[0] if classes else None
