"""Labels of channels, and which of them must stay or go together.

A label is a number for one index of one dimension of one parameter. Activations carry labels in
*groups*. A group is an integer tensor that broadcasts to the activation; 0 stands for no label.
Dimensions along which a group varies are its *support*.

Removing a label removes all positions that carry it. So a tensor must stay a full grid: positions
of several dimensions may only go in whole slices along one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Groups = list[Tensor]


@dataclass(frozen=True)
class Operand:
    """Hold one input of a step, aligned with the dimensions of the step.

    Args:
        wide: the dimensions along which it has more than one value.
        groups: its labels.
        values: its values, aligned, where they are the same for every input of the network.
    """

    wide: frozenset[int]
    groups: Groups
    values: Tensor | None = None


@dataclass
class Labels:
    """Collect what the steps of a forward pass say about labels."""

    count: int = 1
    edges: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    fixed: list[tuple[Tensor, str]] = field(default_factory=list)
    readers: list[Tensor] = field(default_factory=list)  # labels of parameters that read
    alive: list[Tensor] = field(default_factory=list)
    grids: list[Tensor] = field(default_factory=list)

    def fresh(self, size: int) -> Tensor:
        """Return new labels."""
        self.count += size
        return torch.arange(self.count - size, self.count)

    def fix(self, group: Tensor, why: str) -> None:
        """Keep all channels of a group."""
        labels = distinct(group)
        if bool((labels > 0).any()):
            self.fixed.append((labels[labels > 0], why))

    def join(self, one: Tensor, other: Tensor, why: str) -> Tensor:
        """Let labels at the same positions stay or go together; return the labels of both."""
        one, other = _broadcast(one, other)
        both = (one > 0) & (other > 0)
        self.edges.append((one[both], other[both]))
        alone = torch.where(one > 0, one, other)[~both]
        if bool((alone > 0).any()):
            self.fix(alone, why)
        return torch.where(one > 0, one, other)

    def tie(self, group: Tensor, dims: Iterable[int], why: str) -> Tensor:
        """Join all labels along dimensions; return the group without these dimensions."""
        first = group
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        self.join(first.expand_as(group), group, why)
        return first

    def mix(self, group: Tensor, dims: Iterable[int], why: str) -> Tensor | None:
        """Follow a step that mixes all values along dimensions; None where all channels stay."""
        own = support(group)
        mixed = own & set(dims)
        if mixed == own:
            self.fix(group, why)
            return None
        return self.tie(group, mixed, why) if mixed else group

    def merge(self, operands: Sequence[Operand], why: str) -> Groups:
        """Follow a step that combines its operands position by position."""
        found: Groups = []
        for operand in operands:
            for group in operand.groups:
                found = self._added(found, group, why)
        for operand in operands:
            labelled = {dim for group in operand.groups for dim in support(group)}
            plain = operand.wide - labelled  # here the operand keeps its size whatever is removed
            mixed = [self.mix(group, plain, why) for group in found]
            found = [group for group in mixed if group is not None]
        return found

    def _added(self, found: Groups, group: Tensor, why: str) -> Groups:
        """Add a group to others; groups whose supports overlap become one."""
        out: Groups = []
        for other in found:
            small, big = sorted((group, other), key=lambda g: len(support(g)))
            inner, outer = support(small), support(big)
            if not inner & outer:
                out.append(other)
            elif inner == outer:
                group = self.join(other, group, why)
            elif inner < outer and min(outer) in inner:  # per head, say: whole heads go
                group = self.join(self.tie(big, outer - inner, why), small, why)
            elif inner < outer:
                self.fix(small, why)
                group = self.tie(big, inner, why)
            else:
                self.fix(small, why)
                self.fix(big, why)
                return out
        return [*out, group]

    def contract(self, left: Operand, right: Operand, over: frozenset[int], why: str) -> Groups:
        """Follow a sum of products. Channels that are summed with steady factors are read there.

        Args:
            left: one factor.
            right: the other factor.
            over: the dimensions that are summed.
            why: what the step is called.
        """
        out: Groups = []
        for group in self.merge([left, right], why):
            own = support(group)
            if not own <= over:
                out.append(self.tie(group, own & over, why) if own & over else group)
            elif left.values is None and right.values is None:
                self.fix(group, f"{why} multiplies two activations along it")
            else:
                for factor in (left, right):
                    if factor.values is not None:
                        self.alive.append(_alive(group, factor.values))
                        self.readers += [distinct(g) for g in factor.groups if support(g) <= over]
        return out

    def grid(self, group: Tensor) -> None:
        """Note a group whose positions may only go in whole slices."""
        if len(support(group)) > 1:
            self.grids.append(group)

    def classes(self) -> Tensor:
        """Return the class of every label: labels of one class stay or go together."""
        while True:
            found = _components(self.count, self.edges)
            before = len(self.edges)
            for grid in self.grids:
                group = found[grid]
                group = torch.where(grid > 0, group, 0)
                if len(varying(group)) > 1:
                    dims = sorted(support(grid))
                    self.tie(grid, dims[1:], "a view splits it")
            if len(self.edges) == before:
                return found


def distinct(labels: Tensor) -> Tensor:
    """Return every label once."""
    found: Tensor = labels.unique()  # type: ignore[no-untyped-call]
    return found


def _broadcast(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
    return one.expand(shape), other.expand(shape)


def support(group: Tensor) -> set[int]:
    """Return the dimensions along which a group varies."""
    return {dim for dim, size in enumerate(group.shape) if size > 1}


def varying(group: Tensor) -> set[int]:
    """Return the dimensions along which not all entries are equal."""
    return {
        dim for dim, size in enumerate(group.shape)
        if size > 1 and not bool((group == group.narrow(dim, 0, 1)).all())
    }  # fmt: skip


def compressed(group: Tensor) -> Tensor | None:
    """Return a group with size 1 along dimensions where it is constant; None without labels."""
    if not group.numel():
        return None
    for dim in set(range(group.dim())) - varying(group):
        group = group.narrow(dim, 0, 1)
    if group.numel() <= 1 or not bool((group > 0).any()):
        return None
    return group.contiguous()


def _alive(group: Tensor, factor: Tensor) -> Tensor:
    """Return the labels whose factor is not zero everywhere."""
    others = [d for d in range(factor.dim()) if d not in support(group)]
    used = (factor != 0).any(dim=others[0], keepdim=True) if others else factor != 0
    for dim in others[1:]:
        used = used.any(dim=dim, keepdim=True)
    used, group = _broadcast(used, group)
    return distinct(group[used])


def _components(count: int, edges: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the smallest label that every label is connected with."""
    found = torch.arange(count)
    if not edges:
        return found
    one, other = (torch.cat(ends) for ends in zip(*edges, strict=True))
    while True:
        least = torch.minimum(found[one], found[other])
        new = found.scatter_reduce(0, one, least, "amin").scatter_reduce(0, other, least, "amin")
        new = new[new]
        if torch.equal(new, found):
            return found
        found = new
