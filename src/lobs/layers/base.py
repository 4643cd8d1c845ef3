"""Layer: some weights of a module seen as a matrix problem, and back.

Every prunable weight is brought to one form: a matrix of shape (groups, rows, columns [+ 1 for the
bias]) acting on input vectors ("patches") of shape (groups, n, columns). The column order is the
same on both sides.

How often a weight is used for one input of the network follows from calibration, which counts
patches: `calibration[name].count / calibration.samples * layer.uses_per_patch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import CalibrationError
from lobs.layers.hooks import Handle, Undo, after_forward, before_forward

# Patches are formed in pieces this large, so that memory does not grow with the batch or the image,
# and so that each float32 product sums few enough terms to keep six digits; pieces are then added
# in float64.
PIECE_ELEMENTS = 2**21
PIECE_ROWS = 2**13

OnInput = Callable[[Tensor], None]
OnOutput = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Part:
    """A parameter of a module by its path there, or some of its rows."""

    key: str
    start: int = 0
    stop: int | None = None

    def parameter(self, module: nn.Module) -> Any:
        """The whole parameter, or what stands in its place."""
        return attrgetter(self.key)(module)

    def of(self, module: nn.Module) -> Tensor | None:
        """The rows themselves, as a view."""
        whole: Tensor | None = self.parameter(module)
        return whole if whole is None or self.stop is None else whole[self.start : self.stop]

    def place(self, module: nn.Module) -> Hashable:
        """What two parts have in common if and only if they are the same numbers of one parameter; None for nothing."""
        whole = self.parameter(module)
        if whole is None:
            return None
        # What is computed on the spot, as parametrised weights are, has no identity but its
        # owner's.
        owner = id(whole) if isinstance(whole, nn.Parameter) else (id(module), self.key)
        return owner, self.start, self.stop


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """One prunable matrix of weights, its name in the network, and the module that uses it.

    Where several modules share the weight, `tied` holds the views of the others: inputs of all of
    them count, and the one mask and solution serve them all. A bias takes part only if they share
    that too; otherwise biases stay as they are.
    """

    name: str
    module: nn.Module
    root: bool = False  # the module is the whole network, so its parameters have no prefix
    tied: tuple[Layer, ...] = ()

    # What a kind of layer must say.

    @abstractmethod
    def check_input(self, x: Tensor) -> None:
        """Refuse an input that the layer cannot take, before anything is made of it."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Independent parts, each with its own inputs."""

    @abstractmethod
    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input vectors of one call, as pieces of shape (groups, n, columns)."""

    @abstractmethod
    def vectors(self, x: Tensor) -> int:
        """How many vectors `patches` would yield for this input, in all pieces."""

    @abstractmethod
    def by_unit(self, z: Tensor) -> Tensor:
        """Sum a tensor of the layer's output shape over samples and positions, giving (groups, rows)."""

    @abstractmethod
    def unfolded(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's layout as (groups, rows, columns)."""

    @abstractmethod
    def folded(self, matrix: Tensor) -> Tensor:
        """The inverse of `unfolded`."""

    @property
    @abstractmethod
    def form(self) -> Hashable:
        """Equal for two layers that would make the same patches of one input, so that they may share a weight."""

    @property
    def kind(self) -> str:
        """What people call this kind of layer."""
        return type(self.module).__name__

    @property
    def weight_part(self) -> Part:
        """Where in the module the weight is."""
        return Part("weight")

    @property
    def bias_part(self) -> Part:
        """Where in the module the bias is, if it has one."""
        return Part("bias")

    @property
    def uses_per_patch(self) -> float:
        """Multiplications that one patch asks of one weight, those with zeros put there by the layer's form left out."""
        return 1.0

    @property
    def prefix(self) -> str:
        """What the state dict puts before the module's own parameter names."""
        return "" if self.root else f"{self.name}."

    def called_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The input in the arguments of one call of the module."""
        x = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if not isinstance(x, Tensor):
            raise CalibrationError(
                f"layer '{self.name}' was called with {type(x).__name__}, not with a tensor. Skip "
                "the layer."
            )
        return x

    # What follows from it.

    @property
    def weight(self) -> Tensor:
        """The weight in the module's own layout: a parameter, or a view of some rows of one."""
        weight = self.weight_part.of(self.module)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias that goes with the weight, if there is one and all modules that share the weight share it."""
        place = self.bias_part.place(self.module)
        if any(other.bias_part.place(other.module) != place for other in self.tied):
            return None
        return self.bias_part.of(self.module)

    @property
    def names(self) -> tuple[str, ...]:
        """The layer's name and those of the layers tied to it."""
        return (self.name, *(other.name for other in self.tied))

    @property
    def columns(self) -> int:
        """Inputs of one output unit, without the bias."""
        return self.weight[0].numel()

    @property
    def rows(self) -> int:
        """Output units of one group."""
        return self.weight.shape[0] // self.groups

    def matrix(self) -> Tensor:
        """A copy of the weights as (groups, rows, columns), with the bias as last column where there is one."""
        matrix = self.unfolded(self.weight.detach())
        if self.bias is None:
            return matrix.clone(memory_format=torch.contiguous_format)
        return torch.cat([matrix, self.bias.detach().reshape(self.groups, self.rows, 1)], dim=-1)

    def write(self, matrix: Tensor) -> None:
        """Put a matrix of the shape that `matrix` returns back into the module, in place."""
        with torch.no_grad():
            self.weight.copy_(self.folded(matrix[..., : self.columns]))
            if self.bias is not None:
                self.bias.copy_(matrix[..., self.columns].reshape(self.bias.shape))

    def masks(self, mask: Tensor) -> dict[str, Tensor]:
        """A matrix mask as masks of whole parameters, under their names in the state dict.

        Rows that are another layer's are True: masks of one name from several layers combine by
        `&`.
        """
        out = self._mask(self.weight_part, self.folded(mask[..., : self.columns]))
        if self.bias is not None and not bool(mask[..., self.columns].all()):
            out |= self._mask(self.bias_part, mask[..., self.columns].flatten())
        return out

    def _mask(self, part: Part, rows: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(part.parameter(self.module).shape, dtype=torch.bool, device=rows.device)
        mask[part.start : part.stop] = rows
        return {f"{self.prefix}{part.key}": mask}

    def parameters(self) -> dict[str, tuple[int, int]]:
        """The parameters that are this layer's by name in the state dict, and from which row up to which."""
        parts = [self.weight_part] + ([] if self.bias is None else [self.bias_part])
        spans = [(p, len(p.parameter(self.module)) if p.stop is None else p.stop) for p in parts]
        return {f"{self.prefix}{part.key}": (part.start, stop) for part, stop in spans}

    def tensors(self) -> list[Tensor]:
        """The whole parameters that hold this layer's numbers."""
        parts = [self.weight_part] + ([] if self.bias is None else [self.bias_part])
        return [part.parameter(self.module) for part in parts]

    def on_input(self, callback: OnInput) -> Handle:
        """Call back with what the weight multiplies, before every output of every module that uses it; see `Handle`.

        An input that the layer cannot take is refused before that.
        """

        def checked(view: Layer, x: Tensor) -> None:
            view.check_input(x)
            callback(x)

        return Handle.of(
            *(partial(view._tap_input, partial(checked, view)) for view in (self, *self.tied))
        )

    def on_output(self, callback: OnOutput) -> Handle:
        """Call back with every output, bias added; a tensor that comes back takes its place."""
        return Handle.of(*(partial(view._tap_output, callback) for view in (self, *self.tied)))

    def _tap_input(self, callback: OnInput) -> Undo:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            callback(self.called_with(args, kwargs))

        return before_forward(self.module, hook, with_kwargs=True).remove

    def _tap_output(self, callback: OnOutput) -> Undo:
        return after_forward(self.module, lambda _, __, z: callback(z)).remove
