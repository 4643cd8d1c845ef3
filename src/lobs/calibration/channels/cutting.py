"""Cut channels out of a network's parameters, and check that it still computes the same.

Sizes may also stand in attributes of modules (`num_heads`) or of the configuration that modules
share. Those that make the smaller network run, with the same outputs, are found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.channels.labels import distinct
from lobs.calibration.channels.watching import Family, Slot

Undo = Callable[[], None]
Saved = list[tuple[dict[str, Any], str, Any]]  # dictionaries, keys and old values
_MOST_TRIED = 5  # attributes that are also tried one by one


@dataclass(frozen=True, eq=False)
class Cut:
    """Name the channels of a family that are removed, by their numbers in it."""

    family: Family
    gone: Tensor

    @property
    def left(self) -> int:
        """Return how many channels stay."""
        return len(self.family) - len(self.gone)


def cut(
    model: nn.Module, cuts: Sequence[Cut], differs: Callable[[], str], *, thorough: bool = True
) -> str:
    """Remove channels in place; undo everything where the network is not the same afterwards.

    Args:
        model: the network; changed in place.
        cuts: what to remove.
        differs: runs the network and returns how it differs from before; empty if it does not.
        thorough: also try single attributes.

    Returns:
        Why the channels were left in; empty if they are gone.
    """
    saved = _slice(model, cuts)
    why = differs()
    if not why:
        return ""
    for trial in _trials(_sizes_of(model, cuts), thorough):
        tried = _written(trial)
        why = differs()
        if not why:
            return ""
        _restore(tried)
    _restore(saved)
    return why


def _slice(model: nn.Module, cuts: Sequence[Cut]) -> Saved:
    """Slice parameters and buffers and set the sizes of their modules; return what was there."""
    gone: dict[str, dict[int, list[Tensor]]] = {}
    for each in cuts:
        for (name, dim), indices in each.family.slots.items():
            gone.setdefault(name, {}).setdefault(dim, []).append(indices[each.gone].flatten())
    owners, saved = _owners(model), Saved()
    for name, dims in gone.items():
        tensor = _tensor(model, name)
        new = _without(tensor, {dim: torch.cat(parts) for dim, parts in dims.items()})
        for module, key in owners[id(tensor)]:
            own: Any = module._parameters if key in module._parameters else module._buffers
            known = key in ("weight", "running_mean")
            values = _described(module, tensor, new, dims.get(0, [])) if known else {}
            changed = [(own, key, new), *((vars(module), k, v) for k, v in values.items())]
            saved += _written(changed)
    return saved


def _without(tensor: Tensor, gone: Mapping[int, Tensor]) -> Tensor:
    """Return a tensor without some indices of its dimensions."""
    new = tensor.detach()
    for dim, places in gone.items():
        stay = torch.ones(new.shape[dim], dtype=torch.bool)
        stay[places] = False
        new = new.index_select(dim, stay.nonzero().squeeze(1).to(new.device))
    new = new.clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules that hold each tensor, by its id."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((module, key))
    return found


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), key)
    assert isinstance(tensor, Tensor)
    return tensor


def _described(
    module: nn.Module, old: Tensor, new: Tensor, gone: Sequence[Tensor]
) -> dict[str, int]:
    """Return a module's attributes for the sizes of its new weight.

    Args:
        module: the owner.
        old: its weight before.
        new: its weight now.
        gone: the indices that its first dimension lost.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        sets = module.groups - _whole_groups(gone, module.groups, len(old))
        first, second = len(new), new.shape[1] * sets
        inner, outer = (first, second) if module.transposed else (second, first)
        return {"in_channels": inner, "out_channels": outer, "groups": sets}
    if isinstance(module, nn.GroupNorm):
        sets = module.num_groups * len(new) // len(old)
        return {"num_channels": len(new), "num_groups": sets}
    first_names, last_names = ("out_features", "num_features", "nx"), ("in_features", "nf")
    sizes = dict.fromkeys(first_names, new.shape[0])
    sizes |= dict.fromkeys((*last_names, "embedding_dim"), new.shape[-1])
    return {name: n for name, n in sizes.items() if isinstance(vars(module).get(name), int)}


def _whole_groups(gone: Sequence[Tensor], groups: int, size: int) -> int:
    """Return how many groups of a convolution lose all their indices; 0 if some lose a part."""
    if groups == 1 or not gone:
        return 0
    each = size // groups
    lost = (
        distinct(torch.cat(list(gone))).div(each, rounding_mode="floor").bincount(minlength=groups)
    )
    return int((lost == each).sum()) if bool(((lost == 0) | (lost == each)).all()) else 0


@dataclass(frozen=True)
class _Size:
    """An attribute that may hold a size which has changed.

    Attributes:
        kind: what it is called, and in what class.
        heads: whether its name is that of a number of heads.
        count: whether only its value is that of the number of channels.
        shared: whether it stands in a configuration.
        old: its value.
        new: the value that the change would make of it.
    """

    kind: tuple[str, str]
    heads: bool
    count: bool
    shared: bool
    old: int
    new: int


Places = dict[_Size, list[dict[str, Any]]]  # where each size stands


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes that cuts have changed.

    Attributes:
        counts: numbers of channels, before and after.
        lengths: lengths of parameters along the cut dimensions, before and after.
        widths: indices that one channel has in its parameters, where it has several.
    """

    counts: frozenset[tuple[int, int]] = frozenset()
    lengths: frozenset[tuple[int, int]] = frozenset()
    widths: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, cuts: Sequence[Cut]) -> Sizes:
        """Return the sizes that cuts have changed in a network."""
        counts, lengths = set[tuple[int, int]](), set[tuple[int, int]]()
        widths = {i.shape[1] for each in cuts for i in each.family.slots.values()} - {1}
        for each in cuts:
            counts.add((len(each.family), each.left))
            for (name, dim), indices in each.family.slots.items():
                new = _tensor(model, name).shape[dim]
                lengths.add((new + indices[each.gone].numel(), new))
        return cls(frozenset(counts), frozenset(lengths), frozenset(widths))

    def __or__(self, other: Sizes) -> Sizes:
        """Return the sizes of both."""
        return Sizes(
            self.counts | other.counts, self.lengths | other.lengths, self.widths | other.widths
        )

    def candidates(self, name: str, value: int) -> list[int]:
        """Return what a number with a name may have become; most likely first."""
        found = [new for old, new in sorted(self.lengths | self.counts) if old == value]
        if "head" in name and not any(word in name for word in ("dim", "size")):
            found += [value // n * left for n, left in sorted(self.counts) if value % n == 0]
        return [new for new in dict.fromkeys(found) if new != value]


def _sizes_of(model: nn.Module, cuts: Sequence[Cut]) -> Places:
    """Return the attributes around the cut parameters that may hold a changed size."""
    found: Places = {}
    for each in cuts:
        sizes = Sizes.of(model, [each])
        for module in _around(model, each.family.slots):
            own: list[tuple[Any, bool]] = [(module, False)]
            if hasattr(getattr(module, "config", None), "to_dict"):
                own.append((module.config, True))
            for holder, shared in own:
                for name, value in vars(holder).items():
                    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                        continue
                    for new in sizes.candidates(name, value)[:1]:
                        heads = "head" in name
                        count = value == len(each.family) > 1 and not heads
                        kind = (type(holder).__name__, name)
                        size = _Size(kind, heads, count, shared, value, new)
                        places = found.setdefault(size, [])
                        if not any(place is vars(holder) for place in places):
                            places.append(vars(holder))
    return found


def _around(model: nn.Module, slots: Mapping[Slot, Tensor]) -> Iterator[nn.Module]:
    """Yield the modules between the parameters and their common root, and their neighbours."""
    paths = [name.rpartition(".")[0].split(".") for name, _ in slots]
    shared = 0
    while all(len(p) > shared and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    root = ".".join(paths[0][: min(shared, min(map(len, paths)) - 1)])
    parents = {".".join(path[:-1]) for path in paths}
    above = {
        ".".join(path[:length])
        for path in paths
        for length in range(len(path))
        if ".".join(path[:length]).startswith(root)
    }
    seen: dict[int, nn.Module] = {}
    for name in [*above, *parents]:
        module = model.get_submodule(name)
        inside = module.modules() if name in parents else [module]
        seen |= {id(m): m for m in inside if m._modules or not m._parameters}
    yield from seen.values()


def _trials(places: Places, thorough: bool) -> Iterator[Saved]:
    """Yield sets of attributes to write, the likeliest first."""
    own = [size for size in places if not size.shared]
    shared = [size for size in places if size.shared]
    heads, plain = [s for s in own if s.heads], [s for s in own if not s.count]
    orders = [plain, [*plain, *shared], own, heads, [*heads, *(s for s in shared if s.heads)]]
    if thorough and len(places) <= _MOST_TRIED:
        orders += [[size] for size in places]
    seen: set[frozenset[_Size]] = set()
    for order in orders:
        if order and frozenset(order) not in seen:
            seen.add(frozenset(order))
            yield [(have, s.kind[1], s.new) for s in order for have in places[s]]


def _written(changes: Saved) -> Saved:
    """Write values, and return the old ones."""
    saved = [(have, key, have[key]) for have, key, _ in changes]
    for have, key, value in changes:
        have[key] = value
    return saved


def _restore(saved: Saved) -> None:
    for have, key, value in reversed(saved):
        have[key] = value
