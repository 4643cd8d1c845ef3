"""Layers without dense weights: what is left is the packed form."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.deploy.accelerate.engines import ordinary
from lobs.deploy.accelerate.fusing import replaced
from lobs.deploy.accelerate.layerwise import is_linear
from lobs.deploy.accelerate.modules import LayerEngine, plain_class, same_as
from lobs.deploy.accelerate.native_engines import BitmaskEngine, PlanesEngine
from lobs.deploy.accelerate.shared import SharedPart
from lobs.layers.linear import flipped_linear_class


class Packed(nn.Module):
    """A linear layer that holds its weights packed only.

    `weight` is a dense copy, made at every access. State dicts save and load as before.
    """

    engine: LayerEngine
    owner: BitmaskEngine | PlanesEngine  # holds the weights, perhaps of several layers
    rows: tuple[int, int]  # this layer's rows there
    flipped: bool
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """A dense copy of the weight."""
        dense = self.owner.dense(self.rows)
        return dense.mT.contiguous() if self.flipped else dense

    def forward(self, x: Tensor) -> Tensor:
        """Compute with packed weights; where gradients or other types are wanted, densely."""
        learns = x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        plain = ordinary(x) and x.shape[-1:] == (self.owner.features,)
        if plain and not (learns and torch.is_grad_enabled()):
            return self.engine.run(x)
        return F.linear(x, self.owner.dense(self.rows).to(x), self.bias)

    def extra_repr(self) -> str:
        """Print the engine beside the sizes."""
        rows, features = self.rows[1] - self.rows[0], self.owner.features
        return f"in_features={features}, out_features={rows}, packed, engine={self.engine.name}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}weight"
        rest = {name: tensor for name, tensor in state_dict.items() if name != key}
        super()._load_from_state_dict(rest, prefix, *args)
        if key not in state_dict:
            args[2].append(key)  # the missing keys
            return
        weight = state_dict[key].float()
        self.owner.write(self.rows, weight.mT if self.flipped else weight, self.bias)


def release_dense(model: nn.Module) -> None:
    """Drop the dense weights of layers that compute from packed weights which are smaller."""
    owners: set[BitmaskEngine | PlanesEngine] = set()
    for name, layer in list(model.named_modules()):
        engine = getattr(layer, "engine", None)
        shared = engine.owner if isinstance(engine, SharedPart) else None
        owner = engine if shared is None else shared.engine
        if not is_linear(layer) or not isinstance(owner, BitmaskEngine | PlanesEngine):
            continue
        if owner.nbytes >= 4 * owner.matrix.shape[0] * owner.matrix.shape[1]:
            continue
        rows = (0, owner.matrix.shape[0])
        if isinstance(engine, SharedPart) and shared is not None:
            rows = (shared.cuts[engine.part], shared.cuts[engine.part + 1])
        packed = same_as(_packed_class(plain_class(layer)), layer)
        packed.engine, packed.owner, packed.rows = engine, owner, rows
        packed.flipped = flipped_linear_class(layer) is not None
        del packed._parameters["weight"]
        replaced(model, name, packed)
        owners.add(owner)
    for owner in owners:
        owner.release()


@cache
def _packed_class(plain: Any) -> Any:
    """Return the packed class of a layer's class."""
    return type(f"Packed{plain.__name__}", (Packed, plain), {"__module__": __name__})
