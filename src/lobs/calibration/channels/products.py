"""Sums of products: matrix products and convolutions."""

from __future__ import annotations

from torch import Tensor

from lobs.calibration.channels.labels import Groups, Operand, compressed, support
from lobs.calibration.channels.steps import Call, aligned, operand_of, per_channel


def product(call: Call) -> Groups:
    """Follow a matrix product, with a term that is added or without."""
    *added, left, right = call.tensors()
    batched = left.dim() == 3
    rows: list[int | None] = [0, 1, None, 2] if batched else [None, 0, None, 1]
    columns: list[int | None] = [0, None, 2, 1] if batched else [None, None, 1, 0]
    found = call.labels.contract(
        operand_of(call, left, rows, values=True),
        operand_of(call, right, columns, values=True),
        frozenset({3}),
        call.name,
    )
    groups = [g.squeeze(3) if batched else g.squeeze(3).squeeze(0) for g in found]
    if not added:
        return groups
    wide = frozenset(d for d, s in enumerate(call.out.shape) if s > 1)
    operands = [Operand(wide, groups), *(aligned(call, t, call.out.dim()) for t in added)]
    return call.labels.merge(operands, call.name)


def matrix_vector(call: Call) -> Groups:
    """Keep the channels of a product with a vector; torch runs it for small cases only."""
    for t in call.tensors():
        for g in call.record.groups(t):
            call.labels.fix(g, call.name)
    return []


def convolution(call: Call) -> Groups:
    """Follow a convolution of any number of dimensions and groups."""
    x, weight = call.argument("input"), call.argument("weight")
    sets, labels = call.argument("groups"), call.labels
    given: Groups = []
    for g in call.record.groups(x):
        if support(g) == {1}:
            given.append(g.reshape(1, sets, -1, 1))
        else:
            labels.fix(g, "convolution")
    rows, columns = _weight_labels(call, weight, sets)
    flipped = bool(call.argument("transposed"))
    values = None
    if call.record.steady(weight):
        flat = weight.detach().flatten(2).abs().amax(dim=2) if weight.numel() else None
        if flat is not None:  # (sets, inputs, outputs)
            shape = (sets, -1, flat.shape[1])
            values = flat.view(shape) if flipped else flat.view(shape).mT
            values = values.unsqueeze(0)
    wide_x = frozenset(d for d, s in enumerate((1, sets, x.shape[1] // sets, 1)) if s > 1)
    outputs = call.out.shape[1] // sets
    wide_w = frozenset(d for d, s in enumerate((1, sets, x.shape[1] // sets, outputs)) if s > 1)
    found = labels.contract(
        Operand(wide_x, given),
        Operand(wide_w, [*columns, *rows], values),
        frozenset({2}),
        "convolution",
    )
    spread = [g.expand(1, sets, 1, outputs).reshape(-1) for g in found]
    groups = [
        g for g in (compressed(per_channel(s, call.out.dim())) for s in spread) if g is not None
    ]
    bias = call.argument("bias")
    if bias is None:
        return groups
    wide = frozenset(d for d, s in enumerate(call.out.shape) if s > 1)
    own = [per_channel(g, call.out.dim()) for g in call.record.groups(bias)]
    channels = frozenset({1} if bias.numel() > 1 else ())
    return labels.merge([Operand(wide, groups), Operand(channels, own)], "convolution")


def _weight_labels(call: Call, weight: Tensor, sets: int) -> tuple[Groups, Groups]:
    """Return labels of outputs and of inputs as groups over (1, sets, inputs, outputs)."""
    flipped = bool(call.argument("transposed"))
    rows: Groups = []
    columns: Groups = []
    for g in call.record.groups(weight):
        if support(g) == {0}:
            line = g.reshape(-1)
            (columns if flipped else rows).append(
                line.view(1, sets, -1, 1) if flipped else line.view(1, sets, 1, -1)
            )
        elif support(g) == {1}:
            line = g.reshape(-1)
            (rows if flipped else columns).append(
                line.view(1, 1, 1, -1) if flipped else line.view(1, 1, -1, 1)
            )
        else:
            call.labels.fix(g, "convolution")
    return rows, columns
