"""Modules that compute with an engine where it applies, and with dense torch elsewhere.

They share parameters and names with the module they replace. State dicts, `isinstance` and indexing
stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from lobs.deploy.accelerate.engines import ChainEngine, Engine

M = TypeVar("M", bound=nn.Module)


class LayerEngine(Protocol):
    """What a fast layer computes with."""

    name: str

    def takes(self, x: Tensor) -> bool:
        """Return whether the engine may compute this input."""

    def run(self, x: Tensor) -> Tensor:
        """Return the layer's output."""


class _Fast(nn.Module):
    """A layer whose zeros are skipped: its own class follows it."""

    engine: LayerEngine

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the engine, or with dense torch."""
        engine = self.engine
        out: Tensor = engine.run(x) if engine.takes(x) else super().forward(x)
        return out

    def extra_repr(self) -> str:
        """Print the engine beside the sizes."""
        return f"{super().extra_repr()}, engine={self.engine.name}"


class FastLinear(_Fast, nn.Linear):
    """A Linear whose zeros are skipped."""


class FastConv2d(_Fast, nn.Conv2d):
    """A Conv2d whose zeros are skipped."""


class FastSequential(nn.Sequential):
    """A Sequential in which runs of Linear layers are one compiled call.

    `runs` has the first index, the index after the last, and the engine of each.
    """

    runs: list[tuple[int, int, ChainEngine]]

    def forward(self, x: Any) -> Any:
        """Compute fused runs where they apply, single modules elsewhere."""
        modules = list(self._modules.values())
        at = 0
        for start, stop, engine in self.runs:
            inner = modules[start:stop]
            x = _through(modules[at:start], x)
            x = engine.run(x) if _plain(inner) and engine.takes(x) else _through(inner, x)
            at = stop
        return _through(modules[at:], x)


def _plain(modules: list[Any]) -> bool:
    """Return whether modules may be fused: none has hooks, and none is training (dropout)."""
    for module in modules:
        slots = module.__dict__  # attribute look-up takes longer than a small layer
        if slots["training"] or slots["_forward_hooks"] or slots["_forward_pre_hooks"]:
            return False
    return True


def _through(modules: list[Any], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def same_as(kind: type[M], module: nn.Module) -> M:
    """Return a module of another class with the same parameters, names and settings."""
    twin = kind.__new__(kind)
    twin.__dict__.update(
        {
            key: value.copy() if isinstance(value, dict) else value
            for key, value in module.__dict__.items()
        }
    )
    return twin


def fast_layer(layer: nn.Module, engine: Engine) -> nn.Module:
    """Return the layer, computed by an engine."""
    fast = with_engine(layer, engine)
    engine.attach([fast])
    return fast


def with_engine(layer: nn.Module, engine: LayerEngine) -> nn.Module:
    """Return the layer, computed by an engine that may watch other layers too."""
    plain: Any = type(layer)
    fast: _Fast = same_as(plain if issubclass(plain, _Fast) else _fast_class(plain), layer)
    fast.engine = engine
    return fast


@cache
def _fast_class(plain: Any) -> Any:
    """Return the fast class of a layer's class."""
    known: dict[Any, Any] = {nn.Linear: FastLinear, nn.Conv2d: FastConv2d}
    return known.get(plain) or type(f"Fast{plain.__name__}", (_Fast, plain), {})


def plain_class(layer: nn.Module) -> Any:
    """Return the class of a fast layer before it became fast."""
    return next(c for c in type(layer).__mro__ if not issubclass(c, _Fast))


class _Never:
    """An engine that takes no input."""

    name = "none"

    def takes(self, x: Tensor) -> bool:
        """Return False."""
        return False

    def run(self, x: Tensor) -> Tensor:
        """Do nothing: it is never called."""
        return x


@contextmanager
def densely(model: nn.Module) -> Iterator[None]:
    """Let fast modules compute densely for a while."""
    fast = [module for module in model.modules() if isinstance(module, _Fast)]
    chains = [module for module in model.modules() if isinstance(module, FastSequential)]
    engines, runs = [module.engine for module in fast], [module.runs for module in chains]
    try:
        for module in fast:
            module.engine = _Never()
        for chain in chains:
            chain.runs = []
        yield
    finally:
        for module, engine in zip(fast, engines, strict=True):
            module.engine = engine
        for chain, given in zip(chains, runs, strict=True):
            chain.runs = given
