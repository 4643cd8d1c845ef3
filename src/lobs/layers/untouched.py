"""Leave a network as it was found: attributes, caches and buffers that a forward pass changed.

Networks keep tensors between passes, such as attention biases gathered once. Such a tensor may have
a history, which makes copies and second backward passes fail. After pruning it may be out of date.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs.layers.uses import carry_over

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
_DEEPEST = 3  # levels of containers within containers
_LARGEST = 10_000  # items; larger containers are tables of data, not caches
_OWN = frozenset(vars(nn.Module())) - {"training"}  # what every module has: hooks, parameters


@dataclass(frozen=True, eq=False)
class _Before:
    """A module's attributes and buffers, and the contents of its containers."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    contents: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        own = vars(module)
        contents: list[tuple[Any, Any]] = []
        for key, value in own.items():
            if type(value) in _CONTAINERS and key not in _OWN:
                _note(value, contents)
        return cls(module, dict(own), dict(module._buffers), contents)

    def restore(self) -> bool:
        """Restore everything that differs; return whether an attribute or a buffer did."""
        own, changed = vars(self.module), False
        if not _same(own, self.attributes):
            own.clear()
            own.update(self.attributes)
            changed = True
        if not _same(self.module._buffers, self.buffers):
            self.module._buffers.clear()
            self.module._buffers.update(self.buffers)
            changed = True
        for container, items in self.contents:
            if not _same_items(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)
        return changed


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Restore attributes, containers and buffers of all modules at the end.

    Yields a list that then holds the modules whose attributes or buffers were changed.
    """
    plain = (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))
    before = [_Before.of(module) for module in plain]
    changed: list[nn.Module] = []
    try:
        yield changed
    finally:
        changed += [state.module for state in before if state.restore()]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of a network's buffers at the end, such as counters of passes."""
    own = [b for b in model.buffers() if not (b.is_meta or b.is_inference())]
    before = [(buffer, buffer.clone(), buffer._version) for buffer in own]
    try:
        yield
    finally:
        for buffer, values, version in before:
            if buffer._version != version:
                buffer.copy_(values)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy, also of a network that holds tensors with a history."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            for tensor in _tensors(value, 0):
                if not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
    # The copies are held by `memo`, so that no other object takes the id of one of its keys.
    twin = copy.deepcopy(model, memo)
    carry_over(model, twin)
    return twin


def _note(container: Any, contents: list[tuple[Any, Any]], depth: int = 0) -> None:
    if len(container) > _LARGEST:
        return
    items = dict(container) if isinstance(container, Mapping) else type(container)(container)
    contents.append((container, items))
    if depth < _DEEPEST:
        for value in container.values() if isinstance(container, Mapping) else container:
            if type(value) in _CONTAINERS:
                _note(value, contents, depth + 1)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is value for key, value in b.items())


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, Mapping):
        return _same(now, before)
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a value and in containers inside it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set) and len(value) <= _LARGEST:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth + 1) if depth < _DEEPEST else ()
