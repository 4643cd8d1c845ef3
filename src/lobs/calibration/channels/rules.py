"""What every operation does to labels of channels.

Operations are those that torch runs in the end ("aten"), so composite functions and the code of
modules need no rules. An operation without a rule keeps all channels that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lobs.calibration.channels.mixing import (
    batch_norm,
    glu,
    group_norm,
    layer_norm,
    pointwise,
    reduction,
    spatial,
)
from lobs.calibration.channels.moving import cat, embedding, gather, identity, index, move, pad
from lobs.calibration.channels.products import convolution, matrix_vector, product
from lobs.calibration.channels.steps import Call

Rule = Callable[[Call], Any]  # labels for the output: groups, or a list of groups


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
        return spatial
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
