"""Feasibility checks: refuse a target that cannot be met, before anything is calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lobs.errors import TargetError, caution
from lobs.layers import Layer, all_layers, refused_layers
from lobs.layers.discovery import choose_layers, named, refusal
from lobs.pruning.forecast import network_bytes
from lobs.solvers.checks import check_finite
from lobs.storage.compact.header import header_without_record
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


# Bytes in the record of a compact file's header: of the record without layers, of a layer without
# its names, and of a parameter's rows. Numbers of usual lengths are included.
_RECORD_BYTES, _LAYER_BYTES, _ROWS_BYTES = 1700, 300, 16


def header_bytes(model: nn.Module, layers: Sequence[Layer], counts: Mapping[str, int]) -> int:
    """Return about what a compact file takes beside its tensors: layout, record, alignment.

    A weight that the state dict has under two names is written twice.

    Args:
        model: the network.
        layers: the layers that are pruned.
        counts: how many weights of each layer may go, biases among them where they may go.
    """
    state = {
        name: t
        for name, t in model.state_dict(keep_vars=True).items()
        if isinstance(t, Tensor) and not is_lazy(t)
    }
    whole = sum(t.numel() * t.element_size() for t in state.values())
    spans = [name for layer in layers for name in layer.parameters()]
    masked = {
        name
        for layer in layers
        for name in list(layer.parameters())[: 1 + (counts[layer.name] > layer.weight.numel())]
    }
    record = _RECORD_BYTES + sum(_LAYER_BYTES + len(layer.name) for layer in layers)
    record += sum(_ROWS_BYTES + len(name) for name in spans)
    return header_without_record(state, masked) + record + whole - network_bytes(model)


def header_room(
    size: float,
    model: nn.Module,
    layers: Sequence[Layer],
    target: Budget,
    counts: Mapping[str, int],
) -> int:
    """Return the bytes that a budget leaves for the header; 0 where it has no room for one.

    Args:
        size: the budget in bytes.
        model: the network.
        layers: the layers that are pruned.
        target: the budget, for its limits by layer.
        counts: how many weights of each layer may go.
    """
    gone = sum(
        removable(target, layer.name, counts[layer.name])[1] * layer.weight.element_size()
        for layer in layers
    )
    header = header_bytes(model, layers, counts)
    return header if size >= stored_bytes(model, counts) - gone + header else 0


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
        case Pattern(takes_experts=True):
            target.check_layer("", 1, 1, 1)  # which says what to call
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


SKIPPED, EMBEDDING = "skipped", "an embedding"
UNKNOWN = "not the weight of a layer that lobs knows"
_EXPECTED = (SKIPPED, EMBEDDING)  # reasons that need no warning


@dataclass(frozen=True)
class Coverage:
    """How much of a network could be pruned.

    Args:
        weights: number of all the network's parameters.
        prunable: number of weights in the layers that could be pruned.
        left: names of layers and matrices that stayed dense, by reason. Vectors, such as biases
            and the gains of norms, are not named.
    """

    weights: int
    prunable: int
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the prunable share of all weights."""
        return self.prunable / self.weights if self.weights else 1.0

    def __str__(self) -> str:
        parts = [f"{named(list(names))} ({reason})" for reason, names in self.left.items()]
        dense = f" Left dense: {'; '.join(parts)}." if parts else ""
        return f"{100 * self.share:.1f} % of all {self.weights:,} weights.{dense}"


def coverage(
    model: nn.Module, layers: Iterable[Layer], reasons: Mapping[str, str] | None = None
) -> Coverage:
    """Return how much of a network some layers cover, and what is left.

    Args:
        model: the network.
        layers: the layers that may be pruned.
        reasons: why other layers are left dense, by name.
    """
    chosen, reasons = list(layers), reasons or {}
    everything = [p for p in model.parameters() if not is_lazy(p)]
    ours = {id(t) for layer in chosen for t in layer.tensors()}
    left: dict[str, list[str]] = {}
    named_already = set(ours)
    for layer in all_layers(model):
        weight = layer.weight_part.parameter(layer.module)
        if layer.name in reasons:
            left.setdefault(reasons[layer.name], []).append(layer.name)
            named_already.add(id(weight))
    for name, parameter, owner in _matrices(model):
        if id(parameter) not in named_already:
            what = EMBEDDING if isinstance(owner, nn.Embedding | nn.EmbeddingBag) else UNKNOWN
            left.setdefault(what, []).append(name)
    return Coverage(
        sum(p.numel() for p in everything), sum(layer.weight.numel() for layer in chosen), left
    )


def left_dense(
    model: nn.Module, layers: str | Iterable[str] | None, skip: str | Iterable[str]
) -> dict[str, str]:
    """Return why layers of known kinds stay dense, by name.

    Args:
        model: the network.
        layers: names or globs of the layers that are wanted; None for all.
        skip: names or globs of the layers to leave alone.
    """
    wanted, refused = {x.name for x in choose_layers(model, layers, skip)}, refused_layers(model)
    every = [layer.name for layer in all_layers(model)]
    reasons = {name: refused.get(name, "") if name in wanted else SKIPPED for name in every}
    return {name: reason for name, reason in reasons.items() if reason}


def warn_of(found: Coverage) -> None:
    """Give one warning that names what stays dense although nobody asked for it."""
    parts = [
        f"{named(list(names))} ({reason})"
        for reason, names in found.left.items()
        if reason not in _EXPECTED
    ]
    if parts:
        caution(
            f"{100 * found.share:.1f} % of all weights can be pruned. Left dense: "
            f"{'; '.join(parts)}."
        )


def _matrices(model: nn.Module) -> Iterable[tuple[str, Tensor, nn.Module]]:
    """Yield the name, the parameter and its owner of every matrix or larger array.

    Vectors in the shape of an array, such as a class token, do not count.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter) or parameter.numel() == max(parameter.shape, default=1):
                continue
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{key}" if path else key, parameter, module
