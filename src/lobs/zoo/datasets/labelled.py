"""Images with their labels, whatever set they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Split = Literal["train", "test"]


@dataclass(frozen=True)
class LabelledImages:
    """Images of shape (n, channels, height, width), scaled, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = 500, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return batches (images, labels) of the first `limit` samples, as views."""
        n = len(self) if limit is None else min(limit, len(self))
        return [
            (self.images[i : min(i + size, n)], self.labels[i : min(i + size, n)])
            for i in range(0, n, size)
        ]
