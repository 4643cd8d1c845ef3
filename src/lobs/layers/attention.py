"""`nn.MultiheadAttention` as four layers: its query, key, value and output projections.

Each is a linear map with inputs of its own (in cross-attention even a different number of them), so
each is a layer of its own, whether the three input projections are packed into one parameter, of
which they are rows, or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from lobs.layers.attention_forward import ObservedAttention
from lobs.layers.base import OnInput, OnOutput, Part
from lobs.layers.linear import LinearLayer
from lobs.layers.hooks import Undo

Role: TypeAlias = Literal["q", "k", "v", "out"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "out")


@dataclass(frozen=True, eq=False)
class AttentionLayer(LinearLayer):
    """One projection of an attention; its name is the module's with `q_proj`, `k_proj`, `v_proj` or `out_proj` added."""

    module: nn.MultiheadAttention
    role: Role = "out"

    @property
    def prefix(self) -> str:
        """The module's own name: the layer's without the projection's."""
        return self.name.removesuffix(f"{self.role}_proj")

    @property
    def weight_part(self) -> Part:
        """Rows of the packed weight, or a parameter of its own."""
        if self.role == "out":
            return Part("out_proj.weight")
        if self.module.in_proj_weight is None:
            return Part(f"{self.role}_proj_weight")
        return self._third("in_proj_weight")

    @property
    def bias_part(self) -> Part:
        """Rows of the packed bias; it is packed even where weights are not."""
        return Part("out_proj.bias") if self.role == "out" else self._third("in_proj_bias")

    def _third(self, key: str) -> Part:
        width = self.module.embed_dim
        start = ROLES.index(self.role) * width
        return Part(key, start, start + width)

    def _tap_input(self, callback: OnInput) -> Undo:
        return self._observe(lambda seen: seen.inputs[self.role], callback)

    def _tap_output(self, callback: OnOutput) -> Undo:
        return self._observe(lambda seen: seen.outputs[self.role], callback)

    def _observe(self, listeners: Callable[[ObservedAttention], list[Any]], callback: Any) -> Undo:
        seen = ObservedAttention.of(self.module)
        listeners(seen).append(callback)

        def undo() -> None:
            listeners(seen).remove(callback)
            seen.leave_if_unheard()

        return undo


def attention_layers(path: str, module: nn.MultiheadAttention) -> list[AttentionLayer]:
    """The four projections of an attention, in the order in which they run."""
    prefix = f"{path}." if path else ""
    return [AttentionLayer(f"{prefix}{role}_proj", module, role=role) for role in ROLES]
