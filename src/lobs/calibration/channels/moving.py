"""Operations that move values: labels move with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lobs.calibration.channels.labels import Groups, Operand, compressed, support
from lobs.calibration.channels.steps import Call, aligned


def identity(call: Call) -> Groups:
    """Pass labels on."""
    return call.record.groups(call.first())


def move(call: Call) -> Any:
    """Apply a step that only moves values to the labels themselves."""
    x = call.first()
    single = isinstance(call.out, Tensor)
    outs: list[Groups] = [[] for _ in ([call.out] if single else call.out)]
    for group in sorted(call.record.groups(x), key=lambda g: min(support(g))):
        spread = group.expand(x.shape)
        if call.name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
            moved: Any = spread.reshape(call.out.shape)
        else:
            moved = call.function(spread, *call.args[1:], **call.kwargs)
        for groups, part in zip(outs, [moved] if single else moved, strict=True):
            _add_moved(call, groups, part, len(support(group)))
    return outs[0] if single else outs


def _add_moved(call: Call, groups: Groups, moved: Tensor, before: int) -> None:
    """Add moved labels to those of an output.

    Args:
        call: the step.
        groups: the labels so far; changed in place.
        moved: the labels of all positions.
        before: the number of dimensions along which they varied.
    """
    small = compressed(moved)
    if small is None:
        call.labels.fix(moved, "one channel is picked")
    elif any(support(small) & support(other) for other in groups):
        # Two dimensions became one, as heads and their features: only the outer can be cut.
        call.labels.fix(small, "a view merges it with other channels")
    else:
        if len(support(small)) > before:
            call.labels.grid(small)
        groups.append(small)


def index(call: Call) -> Groups:
    """Follow the choice of positions along some dimensions, which keep their size."""
    x, chosen = call.first(), call.argument("indices")
    if chosen is None:
        dims = {call.argument("dim") % x.dim()}
    else:
        dims = {d for d, i in enumerate(chosen) if i is not None}
        for d in list(dims):  # a mask covers several dimensions
            if chosen[d].dtype in (torch.bool, torch.uint8):
                dims |= set(range(d, d + chosen[d].dim()))
    out: Groups = []
    for group in call.record.groups(x):
        rest = call.labels.mix(group, dims, call.name)
        if rest is not None:
            moved = call.function(rest.expand(x.shape), *call.args[1:], **call.kwargs)
            _add_moved(call, out, moved, len(support(rest)))
    return out


def gather(call: Call) -> Groups:
    """Follow the choice of positions along one dimension, by an index for every position."""
    x, chosen, dim = call.first(), call.argument("index"), call.argument("dim")
    dim %= max(1, x.dim())
    rest = [call.labels.mix(g, {dim}, "gather") for g in call.record.groups(x)]
    groups = [g for g in rest if g is not None]
    if any(a != b for d, (a, b) in enumerate(zip(x.shape, chosen.shape, strict=True)) if d != dim):
        for g in groups:
            call.labels.fix(g, "gather")
        return []
    own = aligned(call, x, x.dim())
    return call.labels.merge([Operand(own.wide, groups), aligned(call, chosen, x.dim())], "gather")


def embedding(call: Call) -> Groups:
    """Follow a table's columns."""
    table, out = call.argument("weight"), []
    for group in call.record.groups(table):
        if 0 in support(group):
            call.labels.fix(group, "its rows are looked up")
        else:
            out.append(group.view((1,) * (call.out.dim() - 1) + (-1,)))
    return out


def cat(call: Call) -> Groups:
    """Follow tensors that are put side by side."""
    parts = [t for t in call.args[0] if t.numel()]
    dim = call.argument("dim", 0) % max(1, call.out.dim())
    stack = call.name == "stack"
    known = []
    for t in parts:
        groups = call.record.groups(t)
        known.append([g.unsqueeze(dim) for g in groups] if stack else groups)
    shapes = [[*t.shape[:dim], 1, *t.shape[dim:]] if stack else list(t.shape) for t in parts]
    along = {frozenset(support(g)) for groups in known for g in groups if dim in support(g)}
    out: Groups = []
    used: list[Tensor] = []
    for own in along:
        pieces = []
        for groups, shape in zip(known, shapes, strict=True):
            size = [s if d in own else 1 for d, s in enumerate(shape)]
            # Channels that are tied along the dimension have labels without it.
            match = [g for g in groups if support(g) in (own, own - {dim})]
            pieces.append((match or [torch.zeros(1, dtype=torch.int64)])[0].expand(size))
            used += match[:1]
        out.append(torch.cat(pieces, dim))
    operands = []
    for groups, shape in zip(known, shapes, strict=True):
        rest = [g for g in groups if not any(g is other for other in used)]
        wide = {d for d, s in enumerate(shape) if s > 1 and d != dim}
        # Groups that are put side by side are one operand's own labels, too.
        operands.append(Operand(frozenset(wide), [*rest, *out]))
    return call.labels.merge(operands, call.name) if operands else []


def pad(call: Call) -> Groups:
    """Follow padding along dimensions without labels."""
    x, amounts = call.first(), call.argument("pad")
    padded = {x.dim() - 1 - place // 2 for place, n in enumerate(amounts) if n}
    out: Groups = []
    for g in call.record.groups(x):
        if not support(g) & padded:
            out.append(g)
        else:
            moved = compressed(torch.constant_pad_nd(g.expand(x.shape), amounts, 0))
            out += [] if moved is None else [moved]
    return out
