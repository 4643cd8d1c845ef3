"""Plan structured pruning: channels that several layers share leave all of them together.

Hidden units of a gated MLP stand in three layers, an attention head in four. Which of them go is
decided by the layers that read them: those lose columns, and repair the loss with the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.run_log import log_event
from lobs.calibration.channels import Channels, Cut, Family, Removal, first_samples, observe
from lobs.errors import LobsError, TargetError
from lobs.layers import Layer
from lobs.solvers.patterns.chosen import Chosen, Reader, cheapest_sets
from lobs.targets import Pattern, Target

if TYPE_CHECKING:
    from lobs.pruning.session import Session


@dataclass(frozen=True, eq=False)
class _Loss:
    """A family that loses channels: how many, and the layers that read them."""

    family: Family
    count: int
    readers: tuple[tuple[Layer, Tensor], ...]  # with the columns that belong to each channel


def coupled_plan(session: Session, target: Pattern) -> dict[str, Target | None] | None:
    """Return every layer's own target; None where no channels can leave the network together.

    Args:
        session: the network, its data and layers.
        target: what is wanted; units.
    """
    order = list(session.calibration)  # which refuses batches that the network cannot take
    example = _example(session.batches)
    if example is None:
        return None
    try:
        channels = observe(session.model, example)
    except Exception as error:  # the network's own code, under observation
        log_event("channels", error=str(error))
        return None
    parts = _parts(session.layers)
    losses = [loss for f in channels.families if (loss := _loss(f, target, parts)) is not None]
    losses = _possible(session.model, example, channels, losses)
    if not losses:
        return None
    gone = _chosen(session, losses, parts, order)
    plan: dict[str, Target | None] = {}
    for layer in session.layers:
        if bool(gone[layer.name].any()):
            plan[layer.name] = Chosen(~layer.unfolded(gone[layer.name]))
        else:
            plan[layer.name] = None if target.table is None else target.for_layer(layer.name)
    return plan


def _example(batches: Iterable[Any]) -> Any:
    """Return some samples that all processes share; None where they cannot be sent."""
    group = process_group()
    if group.size == 1:
        return first_samples(batches)
    own = next((first_samples([batch]) for batch in batches), None)
    parts = {"": own} if isinstance(own, Tensor) else own
    plain = isinstance(parts, Mapping) and all(isinstance(t, Tensor) for t in parts.values())
    ready = group.all_gather(plain)
    if not any(ready):
        return None
    sent = {str(k): t.contiguous() for k, t in parts.items()} if plain and parts else {}
    found, _ = group.broadcast_object(sent, {}, by=ready.index(True))
    return found.get("", found)


def _chosen(
    session: Session,
    losses: Sequence[_Loss],
    parts: Mapping[str, Sequence[Layer]],
    order: Sequence[str],
) -> dict[str, Tensor]:
    """Return which weights go, by layer.

    Later layers come first. An error of a unit then counts for what its readers make of it, and
    not at all where the unit goes.

    Args:
        session: the network, its data and layers.
        losses: the families that lose channels.
        parts: layers by the name of their parameter.
        order: names of the layers as they run.
    """
    gone = {x.name: torch.zeros(x.weight.shape, dtype=torch.bool) for x in session.layers}
    counts = {x.name: torch.ones(x.groups * x.rows, dtype=torch.float64) for x in session.layers}
    last = [max(order.index(layer.name) for layer, _ in loss.readers) for loss in losses]
    for place in sorted(range(len(losses)), key=lambda n: last[n], reverse=True):
        loss = losses[place]
        readers = [
            Reader(session.dense_problem(layer), columns, counts[layer.name])
            for layer, columns in loss.readers
        ]
        chosen = cheapest_sets(readers, loss.count)
        importance = _importance(loss, counts)
        importance[chosen] = 0
        for (name, dim), indices in loss.family.slots.items():
            for layer in parts.get(name, ()):
                _mark(layer, gone[layer.name], dim, indices[chosen].flatten())
                if (name, dim) not in loss.family.readers and indices.shape[1] == 1:
                    _weigh(layer, counts[layer.name], indices.flatten(), importance)
    return gone


def _importance(loss: _Loss, counts: Mapping[str, Tensor]) -> Tensor:
    """Return what an error of each channel counts for in its readers, 1 on average."""
    total = torch.zeros(len(loss.family), dtype=torch.float64)
    for layer, columns in loss.readers:
        squares = layer.matrix()[0].detach().double().cpu().square()
        total += (counts[layer.name] @ squares)[columns].sum(dim=1)
    return total / total.mean().clamp_min(1e-300)


def _weigh(layer: Layer, counts: Tensor, places: Tensor, importance: Tensor) -> None:
    """Set what errors of a layer's units count for."""
    places = places - layer.weight_part.start
    inside = (places >= 0) & (places < len(counts))
    counts[places[inside]] = importance[inside]


def _parts(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Return the layers whose weights are rows of a parameter, by the parameter's name."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        for view in (layer, *layer.tied):
            found.setdefault(f"{view.prefix}{view.weight_part.key}", []).append(layer)
    return found


def _mark(layer: Layer, gone: Tensor, dim: int, places: Tensor) -> None:
    """Mark indices of a parameter's dimension in the layer's part of it."""
    start = layer.weight_part.start if dim == 0 else 0
    places = places - start
    places = places[(places >= 0) & (places < gone.shape[dim])]
    gone.index_fill_(dim, places, True)


def _loss(family: Family, target: Pattern, parts: Mapping[str, Sequence[Layer]]) -> _Loss | None:
    """Return how many channels a family loses; None where it must stay as it is.

    All layers that read its channels must take part, since their columns become zero. And some
    layer must compute them.
    """
    slots = family.slots
    if not all(name in parts for name, _ in family.readers):
        return None
    makers = [n for n, d in slots if n in parts and (n, d) not in family.readers]
    if not makers:
        return None
    named = [target.for_layer(layer.name) for n, _ in slots for layer in parts.get(n, ())]
    asked = target.for_layer(parts[makers[0]][0].name)
    if None in named or asked is None or asked.removes_everything:
        return None
    other = next((n for n in makers if target.for_layer(parts[n][0].name) != asked), None)
    if other is not None:
        raise TargetError(
            f"layers '{parts[makers[0]][0].name}' and '{parts[other][0].name}' lose their units "
            "together, but the target names different fractions for them: give them one."
        )
    for name, dim in slots:
        if slots[name, dim].shape[1] == 1 and name in makers:  # a unit, not a head
            for layer in parts[name]:
                asked.check_layer(layer.name, layer.groups, layer.rows, layer.columns)
    count = min(asked.count(len(family)), len(family) - 1)
    if not count:
        return None
    readers = []
    for name, dim in sorted(family.readers):
        for layer in parts[name]:
            columns = _columns(layer, dim, slots[name, dim])
            if columns is None:
                return None
            readers.append((layer, columns))
    return _Loss(family, count, tuple(readers))


def _columns(layer: Layer, dim: int, indices: Tensor) -> Tensor | None:
    """Return the columns of a layer's matrix for each channel; None where it has several groups."""
    if layer.groups != 1:
        return None
    shape = [-1 if d == dim else 1 for d in range(layer.weight.dim())]
    numbers = torch.arange(layer.weight.shape[dim]).view(shape).expand(layer.weight.shape)
    owner = layer.unfolded(numbers)[0, 0]
    order = owner.argsort(stable=True)
    each = len(owner) // layer.weight.shape[dim]
    return order.view(-1, each)[indices].flatten(1)


def _possible(
    model: nn.Module, example: Any, channels: Channels, losses: list[_Loss]
) -> list[_Loss]:
    """Return the losses that the network's code allows, found by cutting a copy."""
    if not losses or (channels.branches and channels.idle):
        return []
    rehearsal = copy.deepcopy(model)
    cuts = []
    for loss in losses:
        family = loss.family
        cuts.append(Cut(family, torch.arange(len(family) - loss.count, len(family))))
    with torch.no_grad():
        for each in cuts:
            for name, dim in each.family.readers:
                weight = rehearsal.get_parameter(name)
                weight.index_fill_(dim, each.family.slots[name, dim][each.gone].flatten(), 0)
    try:
        failed = Removal(rehearsal, example, channels.families).remove(cuts)
    except LobsError as error:
        log_event("channels", error=str(error))
        return []
    stay = {id(each.family): why for each, why in failed}
    for each, why in failed:
        log_event("channels", layer=next(iter(each.family.slots))[0], stays=why)
    return [loss for loss in losses if id(loss.family) not in stay]
