"""What every operation does to labels of channels.

Operations are those that torch runs in the end ("aten"), so composite functions and the code of
modules need no rules. An operation without a rule keeps all channels that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from lobs.calibration.channels.labels import Groups, Labels, Operand, compressed, support


class Record(Protocol):
    """What is known of the tensors of a forward pass."""

    labels: Labels

    def groups(self, tensor: Tensor) -> Groups:
        """Return a tensor's labels."""

    def steady(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same for every input of the network."""

    def alike(self, tensor: Tensor) -> set[int]:
        """Return the dimensions along which all values of a tensor are known to be the same."""


@dataclass(frozen=True)
class Call:
    """One run of an operation: its name, arguments and output."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    record: Record

    @property
    def labels(self) -> Labels:
        """Return what is known of labels."""
        return self.record.labels

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operation's schema."""
        for place, argument in enumerate(self.function._schema.arguments):
            if argument.name == name:
                given = self.args[place] if place < len(self.args) else None
                value = self.kwargs.get(name, given)
                return argument.default_value if value is None else value
        return default

    def tensors(self) -> list[Tensor]:
        """Return all arguments that are tensors."""
        return list(tensors_in((self.args, self.kwargs)))

    def first(self) -> Tensor:
        """Return the first argument that is a tensor."""
        return self.tensors()[0]


Rule = Callable[[Call], Any]  # labels for the output: groups, or a list of groups


def tensors_in(value: Any) -> Any:
    """Yield all tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def rule_of(function: Any) -> Rule | None:
    """Return the rule of an operation; None where there is none."""
    name = function._schema.name.removeprefix("aten::")
    plain = name.removesuffix("_") if not name.startswith("_") else name
    for table in (name, plain):
        if table in RULES:
            return RULES[table]
    if _is_pointwise(function):
        return pointwise
    if "pool" in name or name.startswith("upsample"):
        return _spatial
    return None


def _is_pointwise(function: Any) -> bool:
    name = function._schema.name.removeprefix("aten::")
    return torch.Tag.pointwise in function.tags or name.removesuffix("_") in _POINTWISE


def alike_after(call: Call, out: Tensor) -> set[int]:
    """Return the dimensions along which an output's values are known to be the same.

    Their size is a number in the network's code. It may change with the channels beside it.
    """
    given = call.tensors()
    dims = set(range(out.dim()))
    if call.name in _UNIFORM and not any(t.dim() for t in given[1:]):
        return dims
    if not given:
        return set()
    if call.name in ("expand", "slice") or call.name in _IDENTITY:
        x, shift = given[0], out.dim() - given[0].dim()
        same = {d + shift for d in call.record.alike(x)} | set(range(shift))
        return same & dims
    if _is_pointwise(call.function):
        for t in given:
            shift = out.dim() - t.dim()
            dims &= {d + shift for d in call.record.alike(t)} | set(range(shift))
        return dims
    return set()


def pointwise(call: Call) -> Groups:
    """Combine all operands position by position."""
    out = next(iter(tensors_in(call.out)))
    operands = [_aligned(call, t, out.dim()) for t in call.tensors()]
    return call.labels.merge(operands, call.name)


def _aligned(call: Call, tensor: Tensor, dims: int) -> Operand:
    """Return an operand with leading dimensions added, as broadcasting does."""
    return _operand(call, tensor, (None,) * (dims - tensor.dim()) + tuple(range(tensor.dim())))


def _operand(
    call: Call, tensor: Tensor, places: Sequence[int | None], *, values: bool = False
) -> Operand:
    """Return an operand whose dimensions are picked by number; None stands for a new one.

    Args:
        call: the step.
        tensor: its input.
        places: the tensor's dimension for each dimension of the step.
        values: note values where they are steady.
    """

    order = [source for source in places if source is not None]

    def moved(t: Tensor) -> Tensor:
        t = t.permute(order)
        for place, source in enumerate(places):
            t = t.unsqueeze(place) if source is None else t
        return t

    alike = call.record.alike(tensor)
    wide = {place for place, source in enumerate(places) if source not in (None, *alike)}
    known = values and call.record.steady(tensor)
    groups = [moved(group) for group in call.record.groups(tensor)]
    return Operand(frozenset(wide), groups, moved(tensor.detach()) if known else None)


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
    own = _aligned(call, x, x.dim())
    return call.labels.merge([Operand(own.wide, groups), _aligned(call, chosen, x.dim())], "gather")


def embedding(call: Call) -> Groups:
    """Follow a table's columns."""
    table, out = call.argument("weight"), []
    for group in call.record.groups(table):
        if 0 in support(group):
            call.labels.fix(group, "its rows are looked up")
        else:
            out.append(group.view((1,) * (call.out.dim() - 1) + (-1,)))
    return out


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
    own = _aligned(call, x, x.dim())
    operands = [Operand(own.wide, [g for g in mixed if g is not None])]
    operands += [_aligned(call, t, x.dim()) for t in call.tensors()[1:]]
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
                groups.append(_per_channel(tied.expand(sets, size), x.dim()))
        else:
            groups.append(g)
    operands = [Operand(frozenset(range(x.dim())), groups)]
    for t in call.tensors()[1:]:
        own = [_per_channel(g, x.dim()) for g in call.record.groups(t)]
        operands.append(Operand(frozenset({1}), own))
    return [labels.merge(operands, "group norm"), [], []]


def batch_norm(call: Call) -> list[Groups]:
    """Scale and shift every channel."""
    x = call.first()
    operands = [_aligned(call, x, x.dim())]
    for t in call.tensors()[1:]:
        own = [_per_channel(g, x.dim()) for g in call.record.groups(t)]
        operands.append(Operand(frozenset({1} if t.numel() > 1 else ()), own))
    groups = call.labels.merge(operands, "batch norm")
    return [groups, *([] for _ in call.out[1:])]


def _per_channel(labels: Tensor, dims: int) -> Tensor:
    """Return labels of channels as a group of an activation."""
    return labels.reshape(1, -1, *(1,) * (dims - 2))


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


def _spatial(call: Call) -> Any:
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


def product(call: Call) -> Groups:
    """Follow a matrix product, with a term that is added or without."""
    *added, left, right = call.tensors()
    batched = left.dim() == 3
    rows: list[int | None] = [0, 1, None, 2] if batched else [None, 0, None, 1]
    columns: list[int | None] = [0, None, 2, 1] if batched else [None, None, 1, 0]
    found = call.labels.contract(
        _operand(call, left, rows, values=True),
        _operand(call, right, columns, values=True),
        frozenset({3}),
        call.name,
    )
    groups = [g.squeeze(3) if batched else g.squeeze(3).squeeze(0) for g in found]
    if not added:
        return groups
    wide = frozenset(d for d, s in enumerate(call.out.shape) if s > 1)
    operands = [Operand(wide, groups), *(_aligned(call, t, call.out.dim()) for t in added)]
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
    wide_w = frozenset(
        d for d, s in enumerate((1, sets, x.shape[1] // sets, outputs)) if s > 1
    )
    found = labels.contract(
        Operand(wide_x, given),
        Operand(wide_w, [*columns, *rows], values),
        frozenset({2}),
        "convolution",
    )
    spread = [g.expand(1, sets, 1, outputs).reshape(-1) for g in found]
    groups = [g for g in (compressed(_per_channel(s, call.out.dim())) for s in spread) if g is not None]
    bias = call.argument("bias")
    if bias is None:
        return groups
    wide = frozenset(d for d, s in enumerate(call.out.shape) if s > 1)
    own = [_per_channel(g, call.out.dim()) for g in call.record.groups(bias)]
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


_POINTWISE = {
    "hardswish", "masked_fill", "copy", "fill", "zero", "zeros_like", "ones_like", "empty_like",
    "full_like", "rand_like", "randn_like", "_prelu_kernel", "log_sigmoid_forward", "dropout",
    "native_dropout", "bernoulli", "logit", "nan_to_num", "rrelu_with_noise",
}  # fmt: skip
_UNIFORM = (
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
    "full_like", "scalar_tensor",
)  # fmt: skip
_IDENTITY = ("clone", "detach", "alias", "_to_copy", "lift_fresh", "contiguous", "to")
_MOVES = (
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "unbind", "flip", "roll",
    "repeat", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
    "unfold", "diagonal", "repeat_interleave", "movedim", "unsafe_split", "unsafe_chunk", "chunk",
)  # fmt: skip
_REDUCTIONS = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean",
    "norm", "linalg_vector_norm", "any", "all", "argmax", "argmin", "logsumexp", "_softmax",
    "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort", "topk",
    "median", "logcumsumexp",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(_IDENTITY, identity),
    **dict.fromkeys(_MOVES, move),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), product),
    **dict.fromkeys(("mv", "dot", "addmv"), matrix_vector),
    **dict.fromkeys(("convolution", "_convolution"), convolution),
    **dict.fromkeys(("cat", "stack", "concatenate"), cat),
    **dict.fromkeys(("index", "index_select"), index),
    "embedding": embedding,
    "gather": gather,
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "native_batch_norm": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "_batch_norm_no_update": batch_norm,
    "_batch_norm_impl_index": batch_norm,
    "glu": glu,
    "constant_pad_nd": pad,
}
