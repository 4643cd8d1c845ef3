"""View `nn.MultiheadAttention` as four layers: query, key, value and output projections.

Each projection is a linear map with its own inputs. In cross-attention even the number of inputs
differs. So each projection is one layer, also where three of them are rows of one packed parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from lobs.layers.attention_forward import ObservedAttention
from lobs.layers.base import OnInput, OnOutput, Part
from lobs.layers.hooks import Undo
from lobs.layers.linear import LinearLayer

Role: TypeAlias = Literal["q", "k", "v", "out"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "out")


@dataclass(frozen=True, eq=False)
class AttentionLayer(LinearLayer):
    """View one projection of an attention as a layer.

    Its name is the module's name with `q_proj`, `k_proj`, `v_proj` or `out_proj` added.
    """

    module: nn.MultiheadAttention
    role: Role = "out"

    @property
    def prefix(self) -> str:
        """Return the module's own name: the layer's name without the projection's."""
        return self.name.removesuffix(f"{self.role}_proj")

    @property
    def weight_part(self) -> Part:
        """Return the rows of the packed weight, or the separate parameter."""
        if self.role == "out":
            return Part("out_proj.weight")
        if self.module.in_proj_weight is None:
            return Part(f"{self.role}_proj_weight")
        return self._third("in_proj_weight")

    @property
    def bias_part(self) -> Part:
        """Return the rows of the packed bias, which is packed even where weights are not."""
        return Part("out_proj.bias") if self.role == "out" else self._third("in_proj_bias")

    def _third(self, key: str) -> Part:
        width = self.module.embed_dim
        start = ROLES.index(self.role) * width
        return Part(key, start, start + width)

    def _tap_input(self, callback: OnInput) -> Undo:
        return self._observe(lambda seen: seen.inputs[self.role], callback)

    def _tap_output(self, callback: OnOutput) -> Undo:
        return self._observe(lambda seen: seen.outputs[self.role], callback)

    def _observe(self, observers: Callable[[ObservedAttention], list[Any]], callback: Any) -> Undo:
        seen = ObservedAttention.of(self.module)
        observers(seen).append(callback)

        def undo() -> None:
            observers(seen).remove(callback)
            seen.remove_if_unused()

        return undo


def attention_layers(path: str, module: nn.MultiheadAttention) -> list[AttentionLayer]:
    """Return the four projections of an attention, in running order."""
    prefix = f"{path}." if path else ""
    return [AttentionLayer(f"{prefix}{role}_proj", module, role=role) for role in ROLES]
