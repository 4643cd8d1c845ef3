"""What a target asks of a whole network: refused here, before anything is calibrated, where it cannot be met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lobs.errors import TargetError
from lobs.pruning.forecast import network_bytes
from lobs.layers import Layer
from lobs.targets import Block, Budget, Sparsity, Target, check_names, for_layer, removable


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
    """Refuse a target that names no layer, contradicts itself, or cannot be met however it is shared out."""
    check_names(target, [layer.name for layer in layers])
    match target:
        case Block():
            for layer in layers:
                _check_block(target, layer)
        case Sparsity(scope="network") | Budget():
            _check_shared(target, model, layers, prune_bias)


def _check_block(target: Block, layer: Layer) -> None:
    asked = for_layer(target, layer.name)
    if not isinstance(asked, Block) or isinstance(asked.fraction, Mapping) or asked.fraction == 1:
        return
    high, wide = asked.shape
    blocks = layer.groups * -(-layer.rows // high) * -(-layer.columns // wide)
    if asked.count(blocks) == blocks:
        raise TargetError(
            f"layer '{layer.name}' has only {blocks} block(s) of {high}×{wide} or what fits of it: "
            "all would go for "
            f"{asked.fraction:g}. Take smaller blocks, or skip the layer."
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
