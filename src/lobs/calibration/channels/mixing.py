"""Operations that combine values: position by position, or along dimensions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lobs.calibration.channels.labels import Groups, Operand, support
from lobs.calibration.channels.steps import Call, aligned, per_channel, tensors_in


def pointwise(call: Call) -> Groups:
    """Combine all operands position by position."""
    out = next(iter(tensors_in(call.out)))
    operands = [aligned(call, t, out.dim()) for t in call.tensors()]
    return call.labels.merge(operands, call.name)


def reduction(call: Call) -> Groups:
    """Follow a step that mixes all values along its dimensions."""
    x, out = call.first(), next(iter(tensors_in(call.out)))
    given = call.argument("dim")
    given = list(range(x.dim())) if given in (None, []) else given
    given = given if isinstance(given, list | tuple) else [given]
    dims = {d % max(1, x.dim()) for d in given}
    mixed = [call.labels.mix(g, dims, call.name) for g in call.record.groups(x)]
    groups = [g for g in mixed if g is not None]
    if out.dim() == x.dim():
        return groups
    return [g.reshape([s for d, s in enumerate(g.shape) if d not in dims]) for g in groups]


def layer_norm(call: Call) -> list[Groups]:
    """Mix the last dimensions, then scale and shift."""
    x = call.first()
    last = range(x.dim() - len(call.argument("normalized_shape")), x.dim())
    mixed = [call.labels.mix(g, last, "layer norm") for g in call.record.groups(x)]
    own = aligned(call, x, x.dim())
    operands = [Operand(own.wide, [g for g in mixed if g is not None])]
    operands += [aligned(call, t, x.dim()) for t in call.tensors()[1:]]
    return [call.labels.merge(operands, "layer norm"), [], []]


def group_norm(call: Call) -> list[Groups]:
    """Mix the channels of a group and all positions, then scale and shift."""
    x, labels, sets = call.first(), call.labels, call.argument("group")
    size = x.shape[1] // sets
    groups: Groups = []
    for g in call.record.groups(x):
        if support(g) != {1}:
            labels.fix(g, "group norm")
        elif size > 1:
            tied = labels.tie(g.view(sets, size), [1], "group norm") if sets > 1 else None
            if tied is None:
                labels.fix(g, "group norm")
            else:
                groups.append(per_channel(tied.expand(sets, size), x.dim()))
        else:
            groups.append(g)
    operands = [Operand(frozenset(range(x.dim())), groups)]
    for t in call.tensors()[1:]:
        own = [per_channel(g, x.dim()) for g in call.record.groups(t)]
        operands.append(Operand(frozenset({1}), own))
    return [labels.merge(operands, "group norm"), [], []]


def batch_norm(call: Call) -> list[Groups]:
    """Scale and shift every channel."""
    x = call.first()
    operands = [aligned(call, x, x.dim())]
    for t in call.tensors()[1:]:
        own = [per_channel(g, x.dim()) for g in call.record.groups(t)]
        operands.append(Operand(frozenset({1} if t.numel() > 1 else ()), own))
    groups = call.labels.merge(operands, "batch norm")
    return [groups, *([] for _ in call.out[1:])]


def glu(call: Call) -> Groups:
    """Multiply one half with a function of the other."""
    x = call.first()
    dim = call.argument("dim") % x.dim()
    halves: list[Groups] = [[], []]
    for g in call.record.groups(x):
        if dim in support(g):
            for half, part in zip(halves, g.chunk(2, dim), strict=True):
                half.append(part)
        else:
            halves[0].append(g)
            halves[1].append(g)
    wide = frozenset(d for d, s in enumerate(call.out.shape) if s > 1)
    return call.labels.merge([Operand(wide, half) for half in halves], "glu")


def spatial(call: Call) -> Any:
    """Follow a step on every channel's positions: pooling, resampling."""
    x, out = call.first(), next(iter(tensors_in(call.out)))
    positions = 3 if "3d" in call.name else 1 if "1d" in call.name else 2
    groups: Groups = []
    for g in call.record.groups(x):
        if out.dim() != x.dim() or support(g) & set(range(x.dim() - positions, x.dim())):
            call.labels.fix(g, call.name)
        else:
            groups.append(g)
    return groups if isinstance(call.out, Tensor) else [groups] * len(call.out)
