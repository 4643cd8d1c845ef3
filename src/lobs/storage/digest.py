"""Hash what decides a run's result: tensors, arrays, settings, functions, networks and their state.

Two values with the same digest lead to the same run, as far as Python shows. Not covered: files
that a function reads, the code of other packages, and attributes that `forward` itself assigns.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEEPEST = 12  # levels of containers and objects that are followed
# torch.nn.Module keeps these for itself: weights are hashed on their own, hooks do not count.
_MODULE = frozenset(vars(nn.Module()))


def digest_of(value: Any) -> str:
    """Return a hash of a value that is the same in every process."""
    digest = Digest()
    digest.add(value)
    return digest.text


def identified(value: Any) -> str:
    """Return a value as text that differs where the value does: its repr, and a hash if needed."""
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return shown if _is_plain(value) else f"{' '.join(shown.split())[:200]} #{digest_of(value)[:8]}"


def _is_plain(value: Any) -> bool:
    """Return whether a value's repr says all of it."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, [*value, *value.values()]))
    if is_dataclass(value) and not isinstance(value, type):
        parts = fields(value)
        return all(part.repr for part in parts) and all(
            _is_plain(getattr(value, part.name, None)) for part in parts
        )
    return isinstance(value, bool | int | float | str | None)


def digest_of_data(data: Iterable[Any], most: int) -> str:
    """Return a hash of the first batches of data that are read many times, in their order.

    All random generators are restored, also those that a data loader holds. The hash therefore
    covers the order in which a seeded loader shuffles.

    Args:
        data: the batches.
        most: number of batches to read at most.
    """
    own = {id(g): (g, g.get_state()) for g in _generators(data)}
    plain, arrays = random.getstate(), np.random.get_state()
    digest, count = Digest(), 0
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            for batch in islice(data, most):
                digest.add(batch)
                count += 1
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
        for generator, state in own.values():
            generator.set_state(state)
    return f"{count} batches {digest.text[:16]}"


def _generators(value: Any, depth: int = 3) -> Iterator[torch.Generator]:
    """Yield the generators that a loader, its samplers and its data set hold."""
    for item in vars(value).values() if hasattr(value, "__dict__") and depth else ():
        if isinstance(item, torch.Generator):
            yield item
        elif not isinstance(item, Tensor | nn.Module | ModuleType | type):
            yield from _generators(item, depth - 1)


class Digest:
    """Hash values one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open: list[int] = []  # objects whose parts are being hashed: cycles end there

    @property
    def text(self) -> str:
        """Return the first half of the hash so far, as text."""
        return self._hash.hexdigest()[:32]

    def add(self, value: Any) -> None:
        """Add a value with all its parts."""
        if id(value) in self._open or len(self._open) > _DEEPEST:
            self._put("…")
            return
        self._open.append(id(value))
        try:
            self._add(value)
        finally:
            self._open.pop()

    def _put(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self._hash.update(f"{len(raw)}:".encode() + raw)

    def _add(self, value: Any) -> None:
        match value:
            case Tensor():
                self._add_tensor(value)
            case np.ndarray() if value.dtype != object:
                self._put(f"{value.dtype}:{value.shape}")
                self._hash.update(np.ascontiguousarray(value).tobytes())
            case None | bool() | int() | float() | complex() | str() | bytes() | np.generic():
                self._put(f"{type(value).__name__} {value!r}")
            case Mapping():
                self._put(f"{len(value)} items")
                for key, item in value.items():
                    self.add(key)
                    self.add(item)
            case tuple() | list():
                self._put(f"{len(value)} values")
                for item in value:
                    self.add(item)
            case set() | frozenset():
                self.add(sorted(map(digest_of, value)))
            case nn.Module():
                self._add_network(value)
            case FunctionType() | MethodType() | partial() | BuiltinFunctionType() | type():
                self._add_function(value)
            case _:
                self._add_object(value)

    def _add_tensor(self, tensor: Tensor) -> None:
        self._put(f"{tensor.dtype}:{tuple(tensor.shape)}")
        if not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._hash.update(flat.view(torch.uint8).numpy().data)

    def _add_network(self, network: nn.Module) -> None:
        """Add modules, parameters, all buffers, and attributes that `forward` does not assign."""
        for name, module in network.named_modules():
            self._put(f"{name}:{type(module).__module__}.{type(module).__qualname__}")
            for part in (module._parameters, module._buffers):
                self.add(dict(part))
            assigned = _assigned_in_use(type(module))  # type: ignore[arg-type]  # types are hashable
            for key, value in sorted(vars(module).items()):
                if key not in _MODULE and key not in assigned and not isinstance(value, nn.Module):
                    self._put(key)
                    self.add(value)

    def _add_function(self, function: Any) -> None:
        if isinstance(function, partial):
            self.add([function.func, function.args, function.keywords])
        elif isinstance(function, MethodType):
            self.add([function.__func__, function.__self__])
        else:
            self._put(f"{function.__module__}.{function.__qualname__}")
            if isinstance(function, FunctionType) and not _is_library(function.__module__):
                self.add([function.__defaults__, function.__kwdefaults__])
                self._add_code(function.__code__)
                self.add(list(_captured(function)))

    def _add_code(self, code: CodeType) -> None:
        self._hash.update(code.co_code)
        self.add(list(code.co_names))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_code(constant)
            else:
                self.add(constant)

    def _add_object(self, value: Any) -> None:
        self._put(f"{type(value).__module__}.{type(value).__qualname__}")
        if is_dataclass(value):
            for item in fields(value):
                self._put(item.name)
                self.add(getattr(value, item.name, None))
        elif isinstance(value, torch.Generator | ModuleType) or not hasattr(value, "__dict__"):
            if not isinstance(value, ModuleType):
                self._put(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
        else:
            called = vars(type(value)).get("__call__")
            if isinstance(called, FunctionType):
                self._add_function(called)
            self.add(dict(sorted(vars(value).items())))


def _captured(function: FunctionType) -> Iterator[Any]:
    """Yield what a function reads from outside: its closure, and plain globals of its file."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        # A list without arrays is mostly a record of calls, which grows while it is used.
        if not isinstance(value, list) or any(_holds_data(item) for item in value):
            yield value
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        own = isinstance(value, FunctionType) and value.__globals__ is function.__globals__
        if own or isinstance(value, bool | int | float | str | Tensor | np.ndarray | tuple):
            yield value


def _holds_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_data, value))
    return isinstance(value, Tensor | np.ndarray | Mapping | FunctionType)


@lru_cache(maxsize=1024)
def _assigned_in_use(kind: type) -> frozenset[str]:
    """Return the attributes that `forward`, and what it calls, assign: they change in use."""
    found, waiting, done = set[str](), {"forward"}, set[str]()
    while waiting:
        name = waiting.pop()
        done.add(name)
        method = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]  # or None
        if isinstance(method, FunctionType) and not _is_library(method.__module__):
            steps = dis.get_instructions(method.__code__)
            found |= {str(s.argval) for s in steps if s.opname == "STORE_ATTR"}
            waiting |= {n for n in method.__code__.co_names if hasattr(kind, n)} - done
    return frozenset(found)


def _is_library(module: str | None) -> bool:
    top = str(module).partition(".")[0]
    return top in ("torch", "numpy") or top in sys.stdlib_module_names
