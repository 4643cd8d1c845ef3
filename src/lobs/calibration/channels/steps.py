"""One run of an operation, and its inputs aligned with its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lobs.calibration.channels.labels import Groups, Labels, Operand


class Record(Protocol):
    """What is known of the tensors of a forward pass."""

    labels: Labels

    def groups(self, tensor: Tensor) -> Groups:
        """Return a tensor's labels."""

    def steady(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same for every input of the network."""

    def alike(self, tensor: Tensor) -> set[int]:
        """Return the dimensions along which all values of a tensor are known to be the same."""


@dataclass(frozen=True)
class Call:
    """One run of an operation: its name, arguments and output."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    record: Record

    @property
    def labels(self) -> Labels:
        """Return what is known of labels."""
        return self.record.labels

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operation's schema."""
        for place, argument in enumerate(self.function._schema.arguments):
            if argument.name == name:
                given = self.args[place] if place < len(self.args) else None
                value = self.kwargs.get(name, given)
                return argument.default_value if value is None else value
        return default

    def written(self) -> list[Tensor]:
        """Return the tensors that the operation writes in place."""
        given = self.function._schema.arguments
        found = [self.argument(a.name) for a in given if a.alias_info and a.alias_info.is_write]
        return list(tensors_in(found))

    def tensors(self) -> list[Tensor]:
        """Return all arguments that are tensors."""
        return list(tensors_in((self.args, self.kwargs)))

    def first(self) -> Tensor:
        """Return the first argument that is a tensor."""
        return self.tensors()[0]


def tensors_in(value: Any) -> Any:
    """Yield all tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def aligned(call: Call, tensor: Tensor, dims: int) -> Operand:
    """Return an operand with leading dimensions added, as broadcasting does."""
    return operand_of(call, tensor, (None,) * (dims - tensor.dim()) + tuple(range(tensor.dim())))


def operand_of(
    call: Call, tensor: Tensor, places: Sequence[int | None], *, values: bool = False
) -> Operand:
    """Return an operand whose dimensions are picked by number; None stands for a new one.

    Args:
        call: the step.
        tensor: its input.
        places: the tensor's dimension for each dimension of the step.
        values: note values where they are steady.
    """
    order = [source for source in places if source is not None]

    def moved(t: Tensor) -> Tensor:
        t = t.permute(order)
        for place, source in enumerate(places):
            t = t.unsqueeze(place) if source is None else t
        return t

    alike = call.record.alike(tensor)
    wide = {place for place, source in enumerate(places) if source not in (None, *alike)}
    known = values and call.record.steady(tensor)
    groups = [moved(group) for group in call.record.groups(tensor)]
    return Operand(frozenset(wide), groups, moved(tensor.detach()) if known else None)


def per_channel(labels: Tensor, dims: int) -> Tensor:
    """Return labels of channels as a group of an activation."""
    return labels.reshape(1, -1, *(1,) * (dims - 2))
