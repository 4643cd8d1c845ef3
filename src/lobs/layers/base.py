"""Define `Layer`: a weight of a module as a matrix problem.

Every prunable weight is brought to one form: a matrix of shape (groups, rows, columns [+ 1 for the
bias]). It acts on input vectors ("patches") of shape (groups, n, columns). The column order is the
same on both sides.

Calibration counts patches. A weight is used
`calibration[name].count / calibration.samples * layer.uses_per_patch` times per network input.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import CalibrationError
from lobs.layers.hooks import Handle, Undo, after_forward, before_forward

# Patches are formed in pieces of at most this size. Memory then does not grow with the batch or the
# image, and each float32 product sums few enough terms to keep six digits. Pieces are added in
# float64.
PIECE_ELEMENTS = 2**21
PIECE_ROWS = 2**13

OnInput = Callable[[Tensor], None]
OnOutput = Callable[[Tensor], Tensor | None]


def joined(pieces: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    """Join small pieces of shape (groups, n, columns), up to some rows: fewer products are faster.

    Args:
        pieces: the pieces.
        rows: vectors of a joined piece, at most; a longer piece stays alone.
    """
    held: list[Tensor] = []
    for piece in pieces:
        if held and sum(p.shape[1] for p in held) + piece.shape[1] > rows:
            yield torch.cat(held, dim=1)
            held.clear()
        held.append(piece)
    if held:
        yield torch.cat(held, dim=1)


@dataclass(frozen=True)
class Part:
    """Name a parameter of a module by its path, or a range of its rows."""

    key: str
    start: int = 0
    stop: int | None = None

    def parameter(self, module: nn.Module) -> Any:
        """Return the whole parameter, or the attribute in its place."""
        return attrgetter(self.key)(module)

    def of(self, module: nn.Module) -> Tensor | None:
        """Return the rows, as a view."""
        whole: Tensor | None = self.parameter(module)
        return whole if whole is None or self.stop is None else whole[self.start : self.stop]

    def place(self, module: nn.Module) -> Hashable:
        """Return a key that is equal for two parts if and only if they are the same numbers.

        None stands for a missing parameter.
        """
        whole = self.parameter(module)
        if whole is None:
            return None
        # A parametrised weight is computed at every access, so only its owner identifies it.
        owner = id(whole) if isinstance(whole, nn.Parameter) else (id(module), self.key)
        return owner, self.start, self.stop


class Absent(Part):
    """Stand for a bias that there is none of."""

    def parameter(self, module: nn.Module) -> Any:
        """Return None."""
        return None


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """Hold one prunable matrix of weights, its name in the network, and the module that uses it.

    Where several modules share the weight, `tied` holds the views of the others. The inputs of all
    of them count, and one mask and one solution serve them all. A bias takes part only if they
    share it too. Otherwise biases stay as they are.
    """

    name: str
    module: nn.Module
    root: bool = False  # the module is the whole network: its parameters have no prefix
    tied: tuple[Layer, ...] = ()

    # To be defined by each kind of layer.

    @abstractmethod
    def check_input(self, x: Tensor) -> None:
        """Raise `CalibrationError` for an input that the layer cannot take."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Return the number of independent parts, each with its own inputs."""

    @abstractmethod
    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input vectors of one call, as pieces of shape (groups, n, columns)."""

    def spacing(self, vectors: int, enough: int) -> int:
        """Return the step between positions that leaves about `enough` of so many vectors."""
        return 1

    def sampled(self, x: Tensor, step: int, start: int) -> Iterator[Tensor]:
        """Yield the input vectors at some positions of one call, as `patches` does.

        Args:
            x: the input.
            step: distance between positions, in each dimension.
            start: the first position, which is taken modulo the step.
        """
        return self.patches(x)

    @abstractmethod
    def vectors(self, x: Tensor) -> int:
        """Return the number of vectors that `patches` would yield for this input."""

    @abstractmethod
    def by_unit(self, z: Tensor) -> Tensor:
        """Sum an output-shaped tensor over samples and positions; return (groups, rows)."""

    @abstractmethod
    def unfolded(self, weight: Tensor) -> Tensor:
        """Reshape a tensor of the weight's layout to (groups, rows, columns)."""

    @abstractmethod
    def folded(self, matrix: Tensor) -> Tensor:
        """Invert `unfolded`."""

    @property
    @abstractmethod
    def form(self) -> Hashable:
        """Return a key that is equal for layers that make the same patches of one input.

        Such layers may share a weight.
        """

    @property
    def kind(self) -> str:
        """Return the module's class name."""
        return type(self.module).__name__

    @property
    def weight_part(self) -> Part:
        """Return the place of the weight in the module."""
        return Part("weight")

    @property
    def bias_part(self) -> Part:
        """Return the place of the bias in the module, if it has one."""
        return Part("bias")

    @property
    def owner(self) -> nn.Module:
        """Return the module whose forward pass uses the weight."""
        return self.module

    @property
    def positions(self) -> int:
        """Return the number of consecutive columns of one input channel: a kernel's size."""
        return math.prod(self.weight.shape[2:])

    @property
    def routed(self) -> bool:
        """Return whether the layer's inputs are chosen anew in every pass, as an expert's are."""
        return False

    @property
    def together(self) -> Hashable:
        """Return a key that is equal for layers that do not feed each other; None for others."""
        return None

    @property
    def uses_per_patch(self) -> float:
        """Return the multiplications per weight and patch, without those by padded zeros."""
        return 1.0

    @property
    def prefix(self) -> str:
        """Return the prefix of the module's parameter names in the state dict."""
        return "" if self.root else f"{self.name}."

    def called_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input from the arguments of one call of the module."""
        x = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if not isinstance(x, Tensor):
            raise CalibrationError(
                f"layer '{self.name}' was called with {type(x).__name__}, not with a tensor. "
                "Skip the layer."
            )
        return x

    # Common to all kinds of layers.

    @property
    def weight(self) -> Tensor:
        """Return the weight in the module's own layout: a parameter, or a view of its rows."""
        weight = self.weight_part.of(self.module)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Return the bias that takes part: all modules that share the weight must share it."""
        place = self.bias_part.place(self.module)
        if any(other.bias_part.place(other.module) != place for other in self.tied):
            return None
        return self.bias_part.of(self.module)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the layer's name and the names of the layers tied to it."""
        return (self.name, *(other.name for other in self.tied))

    @property
    def columns(self) -> int:
        """Return the number of inputs of one output unit, without the bias."""
        return math.prod(self.weight.shape[1:])

    @property
    def rows(self) -> int:
        """Return the number of output units of one group."""
        return self.weight.shape[0] // self.groups

    def matrix(self) -> Tensor:
        """Return a copy of the weights as (groups, rows, columns), a bias as the last column."""
        matrix = self.unfolded(self.weight.detach())
        if self.bias is None:
            return matrix.clone(memory_format=torch.contiguous_format)
        return torch.cat([matrix, self.bias.detach().reshape(self.groups, self.rows, 1)], dim=-1)

    def write(self, matrix: Tensor) -> None:
        """Write a matrix, of the shape that `matrix` returns, into the module."""
        with torch.no_grad():
            self.weight.copy_(self.folded(matrix[..., : self.columns]))
            if self.bias is not None:
                self.bias.copy_(matrix[..., self.columns].reshape(self.bias.shape))

    def masks(self, mask: Tensor) -> dict[str, Tensor]:
        """Return a matrix mask as masks of whole parameters, by their names in the state dict.

        Rows of other layers are True. Masks of one name from several layers combine by `&`.
        """
        out = self._mask(self.weight_part, self.folded(mask[..., : self.columns]))
        if self.bias is not None and not bool(mask[..., self.columns].all()):
            out |= self._mask(self.bias_part, mask[..., self.columns].flatten())
        return out

    def _mask(self, part: Part, rows: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(part.parameter(self.module).shape, dtype=torch.bool, device=rows.device)
        mask[part.start : part.stop] = rows
        return {f"{self.prefix}{part.key}": mask}

    def by_column(self, values: Tensor) -> dict[str, Tensor]:
        """Return a value for each column in the shape of the whole weight, by parameter name.

        Rows of other layers are 1.

        Args:
            values: (groups, columns).
        """
        part, shape = self.weight_part, (self.groups, self.rows, self.columns)
        spread = torch.ones_like(part.parameter(self.module).detach(), dtype=values.dtype)
        spread[part.start : part.stop] = self.folded(values.unsqueeze(1).expand(shape))
        return {f"{self.prefix}{part.key}": spread}

    def parameters(self) -> dict[str, tuple[int, int]]:
        """Return the first and the last row (exclusive) of this layer's parameters, by name."""
        parts = [self.weight_part] + ([] if self.bias is None else [self.bias_part])
        spans = [(p, len(p.parameter(self.module)) if p.stop is None else p.stop) for p in parts]
        return {f"{self.prefix}{part.key}": (part.start, stop) for part, stop in spans}

    def tensors(self) -> list[Tensor]:
        """Return the whole parameters that hold this layer's numbers."""
        parts = [self.weight_part] + ([] if self.bias is None else [self.bias_part])
        return [part.parameter(self.module) for part in parts]

    def on_input(self, callback: OnInput) -> Handle:
        """Call back with the layer's input before every forward pass of every module that uses it.

        An input that the layer cannot take raises first. Remove the returned handle to stop.
        """

        def checked(view: Layer, x: Tensor) -> None:
            if torch._C._functorch.is_batchedtensor(x):
                raise CalibrationError(
                    f"layer '{view.name}' runs inside torch.vmap, which hides the batch. "
                    "Give it whole batches, or skip the layer."
                )
            view.check_input(x)
            callback(x)

        return Handle.of(
            *(partial(view._tap_input, partial(checked, view)) for view in (self, *self.tied))
        )

    def on_output(self, callback: OnOutput) -> Handle:
        """Call back with every output, bias added; a returned tensor replaces the output."""
        return Handle.of(*(partial(view._tap_output, callback) for view in (self, *self.tied)))

    def _tap_input(self, callback: OnInput) -> Undo:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            callback(self.called_with(args, kwargs))

        return before_forward(self.module, hook, with_kwargs=True).remove

    def _tap_output(self, callback: OnOutput) -> Undo:
        return after_forward(self.module, lambda _, __, z: callback(z)).remove
