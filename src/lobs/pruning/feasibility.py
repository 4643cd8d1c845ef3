"""Feasibility checks: refuse a target that cannot be met, before anything is calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from lobs.errors import TargetError
from lobs.layers import Layer
from lobs.layers.discovery import refusal
from lobs.pruning.forecast import network_bytes
from lobs.solvers.checks import check_finite
from lobs.targets import (
    Budget,
    Pattern,
    Sparsity,
    Target,
    check_names,
    for_layer,
    names_in,
    removable,
)


def prunable(layers: Sequence[Layer], prune_bias: bool) -> dict[str, int]:
    """How many weights of each layer may go."""
    biases = {
        layer.name: layer.groups * layer.rows
        for layer in layers
        if layer.bias is not None and prune_bias
    }
    return {layer.name: layer.weight.numel() + biases.get(layer.name, 0) for layer in layers}


def stored_bytes(model: nn.Module, counts: Mapping[str, int]) -> int:
    """All of a network's tensors, and a bit for every prunable weight."""
    return network_bytes(model) + sum(-(-n // 8) for n in counts.values())


def check(
    target: Target, model: nn.Module, layers: Sequence[Layer], prune_bias: bool = False
) -> None:
    """Refuse a target that names no layer, contradicts itself, or cannot be met.

    Args:
        target: what is wanted.
        model: the network.
        layers: the layers to prune.
        prune_bias: biases may be removed too.
    """
    check_names(target, [layer.name for layer in layers])
    for layer in layers:
        if not layer.weight.is_meta:  # weights on disk are checked when they are read
            check_finite(f"layer '{layer.name}'", "weight", layer.matrix())
    _check_empty(target, prunable(layers, prune_bias))
    match target:
        case Pattern() if target.table is not None or not target.ordered:
            check_pattern(target, layers)
        case Sparsity(scope="network") | Budget():
            _check_shared(target, model, layers, prune_bias)


def check_named(target: Target, left: Mapping[str, str]) -> None:
    """Refuse a target that names a layer which cannot be pruned.

    Args:
        target: what is wanted.
        left: why layers are left dense, by name.
    """
    wanted = {name: left[name] for name in names_in(target) if name in left}
    if wanted:
        raise refusal(wanted)


def _check_empty(target: Target, counts: Mapping[str, int]) -> None:
    """Refuse a target that leaves no weight in any layer."""
    match target:
        case Sparsity(scope="network"):
            empty = target.count(sum(counts.values())) == sum(counts.values()) > 0
        case Budget(parameters=kept):
            empty = kept == 0
        case _:
            empty = bool(counts) and all(
                _removes_everything(for_layer(target, name), n) for name, n in counts.items()
            )
    if empty:
        raise empty_target(target)


def empty_target(target: Target) -> TargetError:
    """Return the error for a target that leaves no weight."""
    return TargetError(f"{target} leaves nothing of the network: keep at least one weight.")


def _removes_everything(target: Target | None, count: int) -> bool:
    match target:
        case Pattern():
            return target.removes_everything
        case Sparsity():
            return target.count(count) == count
    return False


def check_pattern(target: Pattern, layers: Iterable[Layer]) -> None:
    """Refuse a pattern that layers cannot take; name all of them."""
    refused: dict[str, TargetError] = {}
    for layer in layers:
        asked = target.for_layer(layer.name)
        if asked is not None:
            try:
                asked.check_layer(layer.name, layer.groups, layer.rows, layer.columns)
            except TargetError as error:
                refused[layer.name] = error
    if refused:
        first = next(iter(refused.values()))
        if len(refused) == 1:
            raise first
        raise TargetError(
            f"{first} {len(refused)} layers are like that; to go on without them: "
            f"skip={[*refused]}."
        )


def _check_shared(
    target: Sparsity | Budget, model: nn.Module, layers: Sequence[Layer], prune_bias: bool
) -> None:
    counts = prunable(layers, prune_bias)
    limits = {name: removable(target, name, n) for name, n in counts.items()}
    total = sum(counts.values())
    fewest, most = (sum(limit[side] for limit in limits.values()) for side in (0, 1))
    match target:
        case Sparsity():
            _check_kept(total - target.count(total), total - most, total - fewest)
        case Budget(parameters=int() | float() as kept):
            _check_kept(min(kept, total), total - most, total - fewest)
        case Budget(bytes=int() | float() as size):
            gone = sum(limits[layer.name][1] * layer.weight.element_size() for layer in layers)
            least = stored_bytes(model, counts) - gone
            if size < least:
                raise TargetError(
                    f"Budget bytes is {size:,.0f}: what cannot be removed takes {least:,} bytes. "
                    "Allow at least those"
                    f"{', or loosen keep_at_least' if most < total else ''}."
                )


def _check_kept(kept: float, least: int, largest: int) -> None:
    if kept < least:
        raise TargetError(
            f"{kept:,.0f} weights are to be kept, but keep_at_least asks for {least:,}: loosen it, "
            "or keep more."
        )
    if kept > largest:
        raise TargetError(
            f"{kept:,.0f} weights are to be kept, but keep_at_most allows {largest:,}: loosen it, "
            "or keep fewer."
        )
