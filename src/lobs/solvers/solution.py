"""The answer to a layer problem: sparse weights, their mask, and the error that is really theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    """A sparse replacement for one layer's weights.

    `mask` is True where a weight was kept, and always so in the bias column. `error` is E
    recomputed from Ψ for these very weights, never accumulated. `curve[k]` is the error with k
    weights removed, for solvers that know it: it is measured with the damping, so `curve[removed] =
    error + damping · ‖V − W‖²`.
    """

    weight: Tensor
    mask: Tensor
    error: float
    energy: float
    removed: int
    prunable: int
    damping: float = 0.0
    curve: Tensor | None = field(default=None, repr=False)
    status: str = "ok"

    def without_tensors(self) -> Solution:
        """Only the numbers: for when the weights lie in a network already and memory is short."""
        return replace(
            self, weight=self.weight.new_empty(0), mask=self.mask.new_empty(0), curve=None
        )

    @property
    def kept(self) -> int:
        """How many prunable weights are left."""
        return self.prunable - self.removed

    @property
    def relative_error(self) -> float:
        """√E over the norm of the dense output; 0 where that output is 0 and nothing moved."""
        if self.energy == 0:
            return 0.0 if self.error == 0 else float("inf")
        return math.sqrt(self.error / self.energy)

    @property
    def losses(self) -> Tensor | None:
        """What each deletion that was made cost, in order; their sum is `curve[removed]`."""
        return None if self.curve is None else self.curve[: self.removed + 1].diff()
