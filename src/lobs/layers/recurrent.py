"""View `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells as layers, two for each level and direction.

`ih` multiplies the input, `hh` the hidden state of the step before. Their rows are the gates. A
projected LSTM has a third, `hr`, which multiplies the state before projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lobs.layers.base import Absent, OnInput, OnOutput, Part
from lobs.layers.hooks import Undo
from lobs.layers.linear import LinearLayer
from lobs.layers.recurrent_forward import ObservedRecurrence

_ORDER = ("ih", "hh", "hr")


@dataclass(frozen=True, eq=False)
class RecurrentLayer(LinearLayer):
    """View one matrix of a recurrent module as a layer.

    Its name is the module's name with the parameter's added, without `weight_`, as in `rnn.ih_l0`.
    """

    role: str = "ih_l0"

    @property
    def prefix(self) -> str:
        """Return the module's own name: the layer's name without the matrix's."""
        return self.name.removesuffix(self.role)

    @property
    def weight_part(self) -> Part:
        """Return the place of the matrix in the module."""
        return Part(f"weight_{self.role}")

    @property
    def bias_part(self) -> Part:
        """Return the place of its bias, where it has one; projections have none."""
        biased = self.module.bias and not self.role.startswith("hr")
        return (Part if biased else Absent)(f"bias_{self.role}")

    def _tap_input(self, callback: OnInput) -> Undo:
        return ObservedRecurrence.of(self.module).observe("inputs", self.role, callback)

    def _tap_output(self, callback: OnOutput) -> Undo:
        return ObservedRecurrence.of(self.module).observe("outputs", self.role, callback)


def recurrent_layers(path: str, module: nn.Module) -> list[RecurrentLayer]:
    """Return the matrices of a recurrent module, in running order."""
    prefix = f"{path}." if path else ""
    names = getattr(module, "_flat_weights_names", ("weight_ih", "weight_hh"))
    keys = [name.removeprefix("weight_") for name in names if name.startswith("weight_")]
    # Both directions of a level read one input, so their `ih` come first.
    keys.sort(key=lambda key: (_level(key), _ORDER.index(key[:2]) > 0, "reverse" in key))
    return [RecurrentLayer(f"{prefix}{key}", module, role=key) for key in keys]


def _level(key: str) -> int:
    parts = key.split("_")
    return int(parts[1][1:]) if len(parts) > 1 else 0
