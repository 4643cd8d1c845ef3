"""Run a network once and see which channels of its parameters stay or go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lobs.calibration.channels.labels import Groups, Labels, distinct
from lobs.calibration.channels.rules import alike_after, rule_of
from lobs.calibration.channels.steps import Call, tensors_in
from lobs.calibration.forward import call, evaluating, parts_of

Slot = tuple[str, int]  # the first name of a parameter or buffer, and one of its dimensions


@dataclass(frozen=True, eq=False)
class Family:
    """Hold channels of one kind: each is a set of indices that go together from all its slots.

    Attributes:
        slots: indices by parameter and dimension, (channels, indices of each channel).
        readers: the slots of weights that multiply the channels and sum over them.
        unread: True for channels to which all these weights are zero.
    """

    slots: dict[Slot, Tensor]
    readers: frozenset[Slot]
    unread: Tensor

    def __len__(self) -> int:
        return len(self.unread)


@dataclass(frozen=True, eq=False)
class Channels:
    """Hold the families of a network, and why the other channels stay.

    Attributes:
        families: channels that can be removed together.
        stays: the reason why all channels of a slot stay.
        branches: whether the network took a branch that depends on computed values.
        idle: the parameters that took no part.
    """

    families: list[Family]
    stays: dict[Slot, str]
    branches: bool
    idle: list[str]


@dataclass
class _Known:
    """What is known of one tensor."""

    groups: Groups = field(default_factory=list)
    steady: bool = False
    computed: bool = False  # its values depend on floating-point values of this input
    alike: frozenset[int] = frozenset()  # dimensions along which all its values are the same


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow labels through all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels, self.branches, self.met = Labels(), False, set[int]()
        # Memory that was written in place, and whether with the same values for every input.
        self.written: dict[int, bool] = {}
        self.known = WeakTensorKeyDictionary()

    def groups(self, tensor: Tensor) -> Groups:
        """Return a tensor's labels."""
        return self._of(tensor).groups

    def steady(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same for every input of the network."""
        return self._of(tensor).steady and self.written.get(_memory(tensor), True)

    def alike(self, tensor: Tensor) -> set[int]:
        """Return the dimensions along which all values of a tensor are known to be the same."""
        single = {d for d, n in enumerate(tensor.shape) if n == 1 or tensor.stride(d) == 0}
        return single if _memory(tensor) in self.written else single | self._of(tensor).alike

    def _of(self, tensor: Tensor) -> _Known:
        found = self.known.get(tensor)  # type: ignore[no-untyped-call]
        return _Known(computed=tensor.is_floating_point()) if found is None else found

    def start(self, tensor: Tensor) -> list[Tensor | None]:
        """Give a parameter labels along each dimension, and return them."""
        lines: list[Tensor | None] = [
            self.labels.fresh(size) if size > 1 else None for size in tensor.shape
        ]
        groups = [
            line.view([-1 if d == dim else 1 for d in range(tensor.dim())])
            for dim, line in enumerate(lines)
            if line is not None
        ]
        self.known[tensor] = _Known(groups, steady=True)
        return lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and follow the labels of its inputs."""
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        self.met |= {id(t) for t in given}
        sources = [self._of(t) for t in given]
        out = func(*args, **kwargs)
        step = Call(_name(func), func, tuple(args), kwargs, out, self)
        if step.name in ("_local_scalar_dense", "is_nonzero", "equal"):
            self._left(step)
            return out
        steady, computed = all(map(self.steady, given)), any(s.computed for s in sources)
        if func._schema.is_mutable:
            for t in step.written():
                self.written[_memory(t)] = steady and self.written.get(_memory(t), True)
        results = list(tensors_in(out))
        for tensor, groups in zip(results, self._followed(step, results), strict=True):
            floats = tensor.is_floating_point() and not steady
            alike = frozenset(alike_after(step, tensor))
            self.known[tensor] = _Known(groups, steady, computed or floats, alike)
        return out

    def _followed(self, step: Call, results: list[Tensor]) -> list[Groups]:
        """Return the labels of an operation's outputs."""
        rule = rule_of(step.function)
        if not any(self._of(t).groups for t in step.tensors()) or not results:
            return [[] for _ in results]
        try:
            found = None if rule is None else rule(step)
        except (RuntimeError, ValueError, IndexError, TypeError):  # shapes a rule does not expect
            found = None
        if found is None:
            for t in step.tensors():
                for group in self.groups(t):
                    self.labels.fix(group, f"'{step.name}' is not followed")
            return [[] for _ in results]
        several = bool(found) and isinstance(found[0], list)
        if isinstance(step.out, Tensor):
            return [found]
        return found if several or (not found and len(results) == 0) else [found] * len(results)

    def _left(self, step: Call) -> None:
        """Note a value that leaves torch: the network may branch on it."""
        for t in step.tensors():
            self.branches |= t.dtype == torch.bool and self._of(t).computed
            for group in self.groups(t):
                self.labels.fix(group, "the network looks at its values")


def _memory(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def _name(function: Any) -> str:
    return str(function._schema.name).removeprefix("aten::")


def observe(model: nn.Module, example: Any) -> Channels:
    """Run a network on an example in eval mode, and return the families of its channels.

    Args:
        model: any network; left as it was found.
        example: a tensor, or a mapping of arguments.
    """
    watch, lines = _Watch(), dict[Slot, Tensor]()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            for dim, line in enumerate(watch.start(tensor)):
                if line is not None:
                    lines[name, dim] = line
    with evaluating(model), _plainly(), watch:
        out = call(model, example)
    for tensor in returned(out):
        for group in watch.groups(tensor):
            watch.labels.fix(group, "the network returns it")
    families, stays = _channels(watch.labels, lines)
    idle = [n for n, p in model.named_parameters() if id(p) not in watch.met]
    return Channels(families, stays, watch.branches, idle)


def first_samples(batches: Iterable[Any], count: int = 2) -> Any:
    """Return the first samples of the first batch, which show a network's structure."""
    batch = next(iter(batches))
    if isinstance(batch, tuple | list):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch[:count]
    sizes = {len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()}
    if len(sizes) != 1:
        return batch
    return {k: v[:count] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}


@contextmanager
def _plainly() -> Iterator[None]:
    """Let attention run as products and a softmax, not as one operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def returned(out: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output; caches are no part of it."""
    if isinstance(out, Tensor):
        yield out
    else:
        for part in parts_of(out):
            yield from returned(part)


def _channels(labels: Labels, lines: Mapping[Slot, Tensor]) -> tuple[list[Family], dict[Slot, str]]:
    """Turn classes of labels into families, and fixed ones into reasons."""
    found = labels.classes()
    why: dict[int, str] = {}
    for group, reason in labels.fixed:
        for number in distinct(found[group]).tolist():
            why.setdefault(number, reason)
    reading = torch.zeros(labels.count, dtype=torch.bool)
    for group in labels.readers:
        reading[group] = True
    read, alive = (set(distinct(found[g]).tolist()) for g in (reading, _joined(labels.alive)))
    members: dict[int, list[tuple[Slot, int]]] = {}
    stays: dict[Slot, str] = {}
    for slot, line in lines.items():
        for place, number in enumerate(found[line].tolist()):
            if number in why:
                stays.setdefault(slot, why[number])
            elif number in read:
                members.setdefault(number, []).append((slot, place))
    kinds: dict[Any, list[int]] = {}
    for number, parts in members.items():
        kinds.setdefault(tuple(Counter(slot for slot, _ in parts).items()), []).append(number)
    readers = frozenset(slot for slot, line in lines.items() if bool(reading[line].any()))
    families = []
    for kind, numbers in kinds.items():
        slots = _indices(dict(kind), [members[n] for n in numbers])
        unread = torch.tensor([n not in alive for n in numbers])
        families.append(Family(slots, readers & slots.keys(), unread))
    return families, stays


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _indices(kind: Mapping[Slot, int], members: list[list[tuple[Slot, int]]]) -> dict[Slot, Tensor]:
    """Return (channels, indices of each) by slot.

    Args:
        kind: the slots, and the number of indices of each channel.
        members: slots and indices of every channel.
    """
    rows: dict[Slot, list[list[int]]] = {slot: [] for slot in kind}
    for parts in members:
        own: dict[Slot, list[int]] = {slot: [] for slot in kind}
        for slot, place in parts:
            own[slot].append(place)
        for slot, places in own.items():
            rows[slot].append(places)
    return {slot: torch.tensor(places) for slot, places in rows.items()}
