"""Modules that compute with an engine where it applies, and with dense torch elsewhere.

They share parameters and names with the module they replace. State dicts, `isinstance` and indexing
stay as they were.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from lobs.deploy.accelerate.engines import ChainEngine, Engine

M = TypeVar("M", bound=nn.Module)


class FastLinear(nn.Linear):
    """A Linear whose zeros are skipped."""

    engine: Engine

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the engine, or with dense torch."""
        return self.engine.run(x) if self.engine.takes(x) else super().forward(x)

    def extra_repr(self) -> str:
        """Print the engine beside the sizes."""
        return f"{super().extra_repr()}, engine={self.engine.name}"


class FastConv2d(nn.Conv2d):
    """A Conv2d whose zeros are skipped."""

    engine: Engine

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the engine, or with dense torch."""
        return self.engine.run(x) if self.engine.takes(x) else super().forward(x)

    def extra_repr(self) -> str:
        """Print the engine beside the sizes."""
        return f"{super().extra_repr()}, engine={self.engine.name}"  # type: ignore[no-untyped-call]


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


def fast_layer(layer: nn.Linear | nn.Conv2d, engine: Engine) -> FastLinear | FastConv2d:
    """Return the layer, computed by an engine."""
    fast = (
        same_as(FastConv2d, layer) if isinstance(layer, nn.Conv2d) else same_as(FastLinear, layer)
    )
    fast.engine = engine
    engine.attach([fast])
    return fast
