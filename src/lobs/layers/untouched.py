"""Leave a network and the random generators as they were found, and let runs draw alike.

Networks keep tensors between passes, such as attention biases gathered once. Such a tensor may have
a history, which makes copies and second backward passes fail. After pruning it may be out of date.

Some networks draw noise in eval mode, too. Dense and pruned outputs can be compared only if both
drew the same. The random state of the caller is restored, so data loaders keep their own.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lobs.layers.uses import carry_over

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
_DEEPEST = 3  # levels of containers within containers
_LARGEST = 10_000  # items; larger containers are tables of data, not caches
_OWN = frozenset(vars(nn.Module())) - {"training"}  # what every module has: hooks, parameters
_HOOKS = tuple(sorted(name for name in _OWN if "forward" in name and "hooks" in name))


@dataclass(frozen=True, eq=False)
class _Before:
    """A module's attributes and buffers, the contents of its containers, and its hooks' keys."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    contents: list[tuple[Any, Any]]
    hooks: list[frozenset[int]]

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        own = vars(module)
        contents: list[tuple[Any, Any]] = []
        for key, value in own.items():
            if type(value) in _CONTAINERS and key not in _OWN:
                _note(value, contents)
        hooks = [frozenset(own.get(name, ())) for name in _HOOKS]
        return cls(module, dict(own), dict(module._buffers), contents, hooks)

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
        for name, keys in zip(_HOOKS, self.hooks, strict=True):
            placed = vars(self.module).get(name, {})
            for key in [key for key in placed if key not in keys]:
                del placed[key]  # else it would be placed again, once for every pass
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


def copied(model: nn.Module, share: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy, also of a network that holds tensors with a history.

    Tensors in `share` are not copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in share}
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            for tensor in _tensors(value, 0):
                if not tensor.is_leaf and id(tensor) not in memo:
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


_ENOUGH = 1024  # elements of a batch that decide its seed


@contextmanager
def same_noise(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the random generators of torch, numpy and Python; restore them afterwards.

    Args:
        seed: equal for runs that must draw the same numbers.
        device: where the network runs.
    """
    seed %= 2**32
    python, arrays = random.getstate(), np.random.get_state()
    # Not torch.manual_seed: it writes down a traceback for accelerators that are not in use.
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(arrays)


def seed_of(*parts: Any) -> int:
    """Return a seed that is equal for equal parts: tensors, strings, numbers, nested ones too."""
    found = 0
    for part in parts:
        if isinstance(part, Tensor):
            found = zlib.crc32(_bytes(part), found)
        elif isinstance(part, Mapping):
            found = seed_of(found, *part.values())
        elif isinstance(part, tuple | list):
            found = seed_of(found, *part)
        elif isinstance(part, str | int | float | bool):
            found = zlib.crc32(str(part).encode(), found)
    return found


def _bytes(x: Tensor) -> bytes:
    if x.is_meta or not x.numel() or x.layout != torch.strided:
        return b""
    with torch._C._DisableFuncTorch():  # forward derivatives would wrap the results
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        some = x.detach().flatten()[:_ENOUGH].cpu().contiguous()
        return some.view(torch.uint8).numpy().tobytes()
