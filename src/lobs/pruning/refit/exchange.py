"""Exchange weights during a refit by blocks: masks get a second look.

A layer's mask was chosen before the block's other layers were solved. Once all of the block's
weights move, other weights matter. A removed weight with the gradient g and half a curvature h
would win g²/4h. A kept weight w costs w²h to remove. So the most wanted removed weights change
places with the least needed kept ones of their layer, once, after the first epoch. The steps that
follow repair the others, and held-out samples decide whether the exchange stays.

Gradients of removed weights are sums over the steps of that epoch, which computes them anyway. They
are noisy, so a win must be several times its cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs._system.distributed import process_group
from lobs.layers import Layer
from lobs.solvers import Auto
from lobs.solvers.problem import Solver
from lobs.targets import Pattern, Sparsity, Target

_SHARE = 0.06  # of a layer's kept weights that change places, at most
_MARGIN = 3.0  # times its cost that an exchange must win


@dataclass
class Exchange:
    """The masks of a block whose weights may change places.

    Args:
        layers: the layers whose weights may change places, each with the number of consecutive
            columns that a weight stays within; 0 for its whole layer.
        masks: True where a weight is kept, by parameter name.
        prefix: what the names of the block's parameters begin with in the network.
    """

    layers: Sequence[tuple[Layer, int]]
    masks: dict[str, Tensor]
    prefix: str

    def names(self) -> set[str]:
        """Return names of the block's parameters that weights may change places in."""
        return {_weight_name(layer).removeprefix(self.prefix) for layer, _ in self.layers}

    def take(self, gains: Mapping[str, Tensor], costs: Mapping[str, Tensor]) -> None:
        """Exchange weights where that wins enough.

        Args:
            gains: what a removed weight would win, by the block's parameter names.
            costs: what a kept weight would cost.
        """
        for layer, span in self.layers:
            name, part = _weight_name(layer), layer.weight_part
            rows = slice(part.start, part.stop)
            own = name.removeprefix(self.prefix)
            matrices = (x[own][rows] for x in (gains, costs))
            mask = self.masks[name].to(gains[own].device, copy=True)
            kept = layer.unfolded(mask[rows])
            gain, cost = (layer.unfolded(x.view(layer.weight.shape)) for x in matrices)
            changed = _exchanged(kept, gain, cost, span).contiguous()
            process_group().broadcast(changed)  # float32 may differ on other processors
            mask[rows] = layer.folded(changed)
            self.masks[name] = mask.to(self.masks[name].device)

    def free_mask(self, name: str, before: Tensor | None) -> Tensor | None:
        """Return where a parameter of the block is free, from its mask so far."""
        if before is None:
            return None
        found = before.clone()
        for layer, _ in self.layers:
            full = _weight_name(layer)
            if full.removeprefix(self.prefix) == name:
                rows = slice(layer.weight_part.start, layer.weight_part.stop)
                found[rows] = self.masks[full][rows].to(found)
        return found


def exchange_in(
    block: str,
    layers: Sequence[Layer],
    plan: Mapping[str, Target | None],
    solver: Solver,
    masks: Mapping[str, Tensor],
    shared: Collection[str] = (),
) -> Exchange:
    """Return which weights of a block may change places: where no solver was named for its masks.

    Args:
        block: the block's name.
        layers: its pruned layers.
        plan: each layer's own target.
        solver: the solver that chose the masks.
        masks: True where a weight is kept, by parameter name.
        shared: names of the block's parameters that are used elsewhere too.
    """
    chosen, prefix = [], f"{block}."
    for layer in layers if isinstance(solver, Auto) else ():
        name, span = _weight_name(layer), _span(plan[layer.name], layer)
        own = name in masks and name.removeprefix(prefix) not in shared and not layer.tied
        if own and span is not None:
            chosen.append((layer, span))
    names = {_weight_name(layer) for layer, _ in chosen}
    return Exchange(chosen, {name: masks[name] for name in names}, prefix)


def _span(target: Target | None, layer: Layer) -> int | None:
    """Return within how many columns a weight may change its place; 0: all; None: not at all."""
    if isinstance(target, Sparsity):
        return 0
    return target.span(layer.columns, layer.positions) if isinstance(target, Pattern) else None


def _exchanged(kept: Tensor, gain: Tensor, cost: Tensor, span: int) -> Tensor:
    """Return a mask with the best exchanges made.

    Args:
        kept: the mask.
        gain: what each removed weight would win.
        cost: what each kept weight would cost.
        span: number of consecutive columns that a weight stays within; 0 for the whole layer.
    """
    most = int(_SHARE * int(kept.sum()))
    lines = (-1, span) if span else (1, -1)
    mask = kept.reshape(lines).clone()
    gain = torch.where(mask, -torch.inf, gain.reshape(lines) / _MARGIN)
    cost = torch.where(mask, cost.reshape(lines), torch.inf)
    each = 1 if span else min(most, mask.numel())
    wins, into = gain.topk(each, dim=1)
    losses, out = cost.topk(each, dim=1, largest=False)
    net = wins - losses
    line, place = (net > 0).nonzero(as_tuple=True)
    best = net[line, place].argsort(descending=True, stable=True)[:most]
    line, place = line[best], place[best]
    mask[line, into[line, place]] = True
    mask[line, out[line, place]] = False
    return mask.view_as(kept)


def _weight_name(layer: Layer) -> str:
    return f"{layer.prefix}{layer.weight_part.key}"
