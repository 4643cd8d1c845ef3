"""What the user wants, as frozen values: how much to remove, or how much error to allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Literal, TypeAlias, TypeVar

from lobs.errors import TargetError

T = TypeVar("T")


@dataclass(frozen=True)
class Sparsity:
    """Remove this fraction of a layer's weights: one number for every layer, or a mapping of layer names or globs.

    The count is exact: ⌊fraction · n + ½⌋ weights go, whatever the ties. Layers that no key matches stay dense. An
    exact name beats a glob; among globs the first that matches wins. With `scope="network"` the fraction is of all layers
    together, and each gives what costs the network's output least (`allocate`).

    >>> Sparsity(0.93).count(1000)
    930
    >>> for_layer(Sparsity({"fc3": 0.35, "fc*": 0.9}), "fc3")
    Sparsity(fraction=0.35, scope='layer')
    """

    fraction: float | Mapping[str, float]
    scope: Literal["layer", "network"] = "layer"

    def __post_init__(self) -> None:
        if self.scope not in ("layer", "network"):
            raise TargetError(f"scope is '{self.scope}': use 'layer' or 'network'.")
        if self.scope == "network" and isinstance(self.fraction, Mapping):
            raise TargetError("a network-wide Sparsity takes one number, not a mapping of layers.")
        for where, value in _entries(self.fraction):
            if not 0.0 <= value <= 1.0:
                raise TargetError(f"Sparsity{where} is {value:g}: the fraction removed must lie between 0 and 1 (90 % is 0.9).")

    def count(self, n: int) -> int:
        """How many of `n` weights go."""
        return math.floor(_single(self.fraction, "Sparsity") * n + 0.5)


@dataclass(frozen=True)
class ErrorBudget:
    """Remove as many weights as keep the layer's error √E at or below ε (or, relative, ε times its output's norm).

    √E = (1/√n)‖ΔZ‖_F is the root mean square change of the layer's output vector. ε may be a mapping like `Sparsity`'s.
    """

    epsilon: float | Mapping[str, float]
    relative: bool = False

    def __post_init__(self) -> None:
        for where, value in _entries(self.epsilon):
            if not (value >= 0.0 and math.isfinite(value)):
                raise TargetError(f"ErrorBudget{where} is {value:g}: ε must be finite and not negative.")

    def limit(self, energy: float) -> float:
        """The largest error E allowed for a layer whose mean squared output is `energy`."""
        epsilon = _single(self.epsilon, "ErrorBudget")
        return epsilon**2 * (energy if self.relative else 1.0)


Target: TypeAlias = Sparsity | ErrorBudget


def as_target(target: Target | float) -> Target:
    """Let a bare number stand for `Sparsity`."""
    if isinstance(target, Sparsity | ErrorBudget):
        return target
    if isinstance(target, Real) and not isinstance(target, bool):
        return Sparsity(float(target))
    raise TargetError(f"target {target!r} is not one of ours: use Sparsity(fraction) or ErrorBudget(epsilon).")


def for_layer(target: Target, name: str) -> Target | None:
    """What a target asks of one layer; None where it asks nothing."""
    match target:
        case Sparsity(fraction=Mapping() as table):
            value = _lookup(table, name)
            return None if value is None else Sparsity(value)
        case ErrorBudget(epsilon=Mapping() as table, relative=relative):
            value = _lookup(table, name)
            return None if value is None else ErrorBudget(value, relative)
    return target


def check_names(target: Target, names: Iterable[str]) -> None:
    """Refuse a mapping with a key that matches no layer: it is a typing error, not a wish."""
    table = target.fraction if isinstance(target, Sparsity) else target.epsilon
    if not isinstance(table, Mapping):
        return
    known = list(names)
    for key in table:
        if not any(key == name or fnmatchcase(name, key) for name in known):
            raise TargetError(f"target names '{key}', which matches no prunable layer. There are: {', '.join(known)}.")


def _lookup(table: Mapping[str, T], name: str) -> T | None:
    if name in table:
        return table[name]
    return next((value for key, value in table.items() if fnmatchcase(name, key)), None)


def _entries(value: float | Mapping[str, float]) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [(f" for '{key}'", float(v)) for key, v in value.items()]
    return [("", float(value))]


def _single(value: float | Mapping[str, float], kind: str) -> float:
    if isinstance(value, Mapping):
        raise TargetError(f"{kind} holds a mapping of layer names; a single layer problem needs one number.")
    return float(value)
