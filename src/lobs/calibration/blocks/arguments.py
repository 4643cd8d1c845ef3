"""What a block is called with: captured once, cut to some samples, cast, compared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.layers.untouched import same_noise, untouched

# A block that runs again must not add to a cache of keys and values.
_CACHES = {
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "use_cache": False,
}
_HIDDEN = object()  # stands in captured arguments where the activations stood


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a block, without the activations that flow through it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Arguments]:
        """Split a call's arguments into the activations, which come first, and all others."""
        if args:
            first, rest = args[0], cls((_HIDDEN, *args[1:]), dict(kwargs))
        else:
            key = next(iter(kwargs), "")
            first, rest = kwargs.get(key), cls((), {**kwargs, key: _HIDDEN})
        kwargs = {key: _CACHES.get(key, value) for key, value in rest.kwargs.items()}
        plain = tuple(None if _is_cache(value) else value for value in rest.args)
        return (first if isinstance(first, Tensor) else None), cls(plain, kwargs)

    def run(self, module: nn.Module, x: Tensor, seed: int = 0) -> Any:
        """Run a module on activations with these arguments, and leave it as it was.

        Args:
            module: the block.
            x: the activations.
            seed: equal for runs that must draw the same random numbers.
        """
        args = [x if value is _HIDDEN else value for value in self.args]
        kwargs = {k: x if v is _HIDDEN else v for k, v in self.kwargs.items()}
        with same_noise(seed, x.device), untouched(module):
            return module(*args, **kwargs)

    def rows(self, rows: slice, count: int) -> Arguments:
        """Return the arguments of some samples of a batch of `count`."""
        cut = partial(rows_of, rows=rows, count=count)
        return Arguments(tuple(map(cut, self.args)), {k: cut(v) for k, v in self.kwargs.items()})

    def to(self, kind: torch.dtype) -> Arguments:
        """Return the arguments with floating-point tensors in another type."""
        args, kwargs = cast(self.args, kind), cast(dict(self.kwargs), kind)
        return Arguments(args, kwargs)

    def same(self, other: Arguments, equal: Any = None) -> bool:
        """Return whether all values are the same objects, or equal by a function for tensors."""
        own = (self.args, *self.kwargs.items())
        return _same(own, (other.args, *other.kwargs.items()), equal)


def flowing(out: Any) -> Tensor | None:
    """Return the activations that a block's output passes on: a tensor, or the first of several."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


def _is_cache(value: Any) -> bool:
    """Return whether a positional argument is a cache as transformers makes them."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def rows_of(value: Any, rows: slice, count: int) -> Any:
    """Cut tensors whose first dimension is the batch, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == count > 1 else value
    if type(value) in (tuple, list):
        return type(value)(rows_of(part, rows, count) for part in value)
    if type(value) is dict:
        return {key: rows_of(part, rows, count) for key, part in value.items()}
    return value


def shapes(value: Any) -> Hashable:
    """Return the shapes of all tensors in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(shapes, value))
    if isinstance(value, Mapping):
        return tuple((str(key), shapes(part)) for key, part in value.items())
    return None


def cast(value: Any, kind: torch.dtype) -> Any:
    """Cast floating-point tensors, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.to(kind) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast(part, kind) for part in value)
    if type(value) is dict:
        return {key: cast(part, kind) for key, part in value.items()}
    return value


def _same(a: Any, b: Any, equal: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and equal is not None and a.shape == b.shape and bool(equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, equal) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and isinstance(a, str | int | float | bool) and a == b
