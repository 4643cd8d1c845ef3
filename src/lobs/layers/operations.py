"""List what is known about the steps between layers: one table for the bound and for `shrink`.

A row names one operation, with all its spellings: module classes, functions and tensor methods. The
error bound reads the Lipschitz constant of a row. `shrink` reads its kind, which says how channels
pass through. To teach both a new operation, add a row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - its usual name


class Kind(Enum):
    """Name how an operation treats its input."""

    IDENTITY = auto()
    ELEMENTWISE = auto()  # the same function of every element
    DROPOUT = auto()  # the identity, except in training
    MAX_POOL = auto()  # the maximum of each window of a channel
    AVERAGE_POOL = auto()  # the mean of each window of a channel
    BATCH_NORM = auto()  # a scale and a shift for every channel
    SOFTMAX = auto()
    FLATTEN = auto()  # dimensions `start_dim` to `end_dim` become one
    RESHAPE = auto()  # the same elements in any other shape
    MEAN = auto()  # the mean over the dimensions `dim`
    SUM = auto()  # of two tensors, the second times `alpha`
    SCALE = auto()  # a product with a number, or of two tensors
    DIVIDE = auto()  # a quotient by a number
    SPREAD = auto()  # every output a mean of inputs: padding by copies, upsampling
    REARRANGE = auto()  # the same elements in another order, and zeros
    LARGEST = auto()  # the maximum over dimensions


@dataclass(frozen=True)
class Operation:
    """Describe one operation.

    Attributes:
        kind: how it treats its input.
        modules: classes that compute it.
        calls: functions that compute it, and names of tensor methods.
        gain: Lipschitz constant in the Euclidean norm; None where unknown or not constant.
        largest: limit on the magnitude of its outputs; None where there is none.
        slope: a setting that can raise the constant: the larger of `gain` and its magnitude holds.
        settings: arguments after the input, in the order of a call, with their defaults.
        dimensions: dimensions of a pooling window.
    """

    kind: Kind
    modules: tuple[type[nn.Module], ...] = ()
    calls: tuple[Any, ...] = ()
    gain: float | None = None
    slope: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    dimensions: int = 0
    largest: float | None = None


_MAX_POOL = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}
_AVERAGE_POOL = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
    "divisor_override": None,
}
_ADAPTIVE = {"output_size": None}
_INPLACE = {"inplace": False}


def _elementwise(
    gain: float,
    modules: tuple[type[nn.Module], ...],
    calls: tuple[Any, ...],
    slope: str = "",
    settings: Mapping[str, Any] = _INPLACE,
    largest: float | None = None,
) -> Operation:
    return Operation(Kind.ELEMENTWISE, modules, calls, gain, slope, settings, largest=largest)


def _pool(
    kind: Kind, n: int, module: type[nn.Module], calls: tuple[Any, ...], settings: Mapping[str, Any]
) -> Operation:
    return Operation(kind, (module,), calls, settings=settings, dimensions=n)


# Constants that are not 1: GELU has its steepest slope, 1.1290, at √2 (1.1291 in the tanh form),
# SiLU 1.0998 at 2.3994, hard-swish 1.5 at 3, sigmoid 1/4 at 0.
OPERATIONS: tuple[Operation, ...] = (
    Operation(Kind.IDENTITY, (nn.Identity,), ("contiguous",), gain=1.0),
    _elementwise(1.0, (nn.ReLU,), (F.relu, torch.relu, "relu", "relu_")),
    _elementwise(1.0, (nn.ReLU6,), (F.relu6,), largest=6.0),
    _elementwise(
        1.0, (nn.Tanh,), (torch.tanh, F.tanh, "tanh", "tanh_"), settings={}, largest=1.0
    ),
    _elementwise(
        0.25,
        (nn.Sigmoid,),
        (torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_"),
        settings={},
        largest=1.0,
    ),
    _elementwise(0.16667, (nn.Hardsigmoid,), (F.hardsigmoid,), largest=1.0),
    _elementwise(1.089, (nn.Mish,), (F.mish,)),
    _elementwise(1.13, (nn.GELU,), (F.gelu,), settings={"approximate": "none"}),
    _elementwise(1.1, (nn.SiLU,), (F.silu,)),
    _elementwise(1.5, (nn.Hardswish,), (F.hardswish,)),
    _elementwise(
        1.0,
        (nn.LeakyReLU,),
        (F.leaky_relu,),
        "negative_slope",
        {"negative_slope": 0.01, **_INPLACE},
    ),
    _elementwise(1.0, (nn.ELU,), (F.elu,), "alpha", {"alpha": 1.0, **_INPLACE}),
    _elementwise(1.0, (nn.Softplus,), (F.softplus,), settings={}),
    _elementwise(1.0, (nn.LogSigmoid,), (F.logsigmoid,), settings={}),
    _elementwise(
        1.0,
        (nn.Hardtanh,),
        (F.hardtanh,),
        settings={"min_val": -1.0, "max_val": 1.0, **_INPLACE},
    ),
    _elementwise(1.0, (nn.Softsign,), (F.softsign,), settings={}, largest=1.0),
    _elementwise(1.0, (nn.Tanhshrink,), (F.tanhshrink,), settings={}),
    _elementwise(1.0, (nn.Softshrink,), (F.softshrink,), settings={}),
    Operation(
        Kind.DROPOUT,
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        settings={"p": 0.5, "training": True, **_INPLACE},
    ),
    _pool(Kind.MAX_POOL, 1, nn.MaxPool1d, (F.max_pool1d, torch.max_pool1d), _MAX_POOL),
    _pool(Kind.MAX_POOL, 2, nn.MaxPool2d, (F.max_pool2d, torch.max_pool2d), _MAX_POOL),
    _pool(Kind.MAX_POOL, 3, nn.MaxPool3d, (F.max_pool3d, torch.max_pool3d), _MAX_POOL),
    _pool(Kind.MAX_POOL, 1, nn.AdaptiveMaxPool1d, (F.adaptive_max_pool1d,), _ADAPTIVE),
    _pool(Kind.MAX_POOL, 2, nn.AdaptiveMaxPool2d, (F.adaptive_max_pool2d,), _ADAPTIVE),
    _pool(Kind.MAX_POOL, 3, nn.AdaptiveMaxPool3d, (F.adaptive_max_pool3d,), _ADAPTIVE),
    _pool(Kind.AVERAGE_POOL, 1, nn.AvgPool1d, (F.avg_pool1d,), _AVERAGE_POOL),
    _pool(Kind.AVERAGE_POOL, 2, nn.AvgPool2d, (F.avg_pool2d,), _AVERAGE_POOL),
    _pool(Kind.AVERAGE_POOL, 3, nn.AvgPool3d, (F.avg_pool3d,), _AVERAGE_POOL),
    _pool(Kind.AVERAGE_POOL, 1, nn.AdaptiveAvgPool1d, (F.adaptive_avg_pool1d,), _ADAPTIVE),
    _pool(Kind.AVERAGE_POOL, 2, nn.AdaptiveAvgPool2d, (F.adaptive_avg_pool2d,), _ADAPTIVE),
    _pool(Kind.AVERAGE_POOL, 3, nn.AdaptiveAvgPool3d, (F.adaptive_avg_pool3d,), _ADAPTIVE),
    Operation(
        Kind.BATCH_NORM,
        (
            nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
            nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        ),
    ),
    # The Jacobian diag(p) − ppᵀ has rows whose magnitudes sum to 2p(1 − p), at most a half.
    Operation(
        Kind.SOFTMAX, (nn.Softmax,), (F.softmax, torch.softmax, "softmax"), gain=0.5, largest=1.0
    ),
    Operation(
        Kind.FLATTEN,
        (nn.Flatten,),
        (torch.flatten, "flatten"),
        gain=1.0,
        settings={"start_dim": 0, "end_dim": -1},
    ),
    Operation(Kind.RESHAPE, (nn.Unflatten,), ("view", "reshape"), gain=1.0),
    Operation(Kind.MEAN, (), (torch.mean, "mean"), settings={"dim": None, "keepdim": False}),
    Operation(
        Kind.SUM,
        (),
        (operator.add, operator.iadd, torch.add, "add", "add_"),
        settings={"other": None, "alpha": 1},
    ),
    Operation(Kind.SCALE, (), (operator.mul, torch.mul, "mul"), settings={"other": None}),
    Operation(
        Kind.DIVIDE, (), (operator.truediv, torch.div, "div"),
        settings={"other": None, "rounding_mode": None},
    ),
    Operation(
        Kind.REARRANGE,
        (nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
        (F.pixel_shuffle, F.pixel_unshuffle),
        gain=1.0,
    ),
    Operation(
        Kind.SPREAD,
        (
            nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
            nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
            nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
        ),
        (F.interpolate,),
        settings={"size": None, "scale_factor": None, "mode": "nearest"},
    ),
    # No maximum moves farther than the element that moved farthest.
    Operation(Kind.LARGEST, (), (torch.amax, "amax"), gain=1.0),
)  # fmt: skip
_BY_MODULE = {module: row for row in OPERATIONS for module in row.modules}
_BY_CALL = {call: row for row in OPERATIONS for call in row.calls}


@dataclass(frozen=True, eq=False)
class Step:
    """Hold one use of an operation: a module, or a call with its arguments after the input."""

    operation: Operation
    module: nn.Module | None = None
    call: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Return the operation's kind."""
        return self.operation.kind

    @property
    def settings(self) -> dict[str, Any]:
        """Return the operation's arguments by name, defaults included."""
        known = self.operation.settings
        if self.module is not None:
            return {name: getattr(self.module, name, value) for name, value in known.items()}
        return {**known, **dict(zip(known, self.args, strict=False)), **self.kwargs}

    @property
    def in_place(self) -> bool:
        """Return whether the input's memory is overwritten."""
        named = isinstance(self.call, str) and self.call.endswith("_")
        return named or self.call is operator.iadd or self.settings.get("inplace") is True

    @property
    def shares_memory(self) -> bool:
        """Return whether the output may be a view of the input, or the input itself."""
        views = (Kind.IDENTITY, Kind.DROPOUT, Kind.FLATTEN, Kind.RESHAPE)
        return self.in_place or self.kind in views

    @property
    def fixed(self) -> bool:
        """Return whether all arguments after the input are constants of the trace."""
        return not any(isinstance(a, fx.Node) for a in (*self.args, *self.kwargs.values()))

    @property
    def gain(self) -> float | None:
        """Return the Lipschitz constant, where it does not depend on the input's shape."""
        row, settings = self.operation, self.settings
        if self.kind is Kind.DROPOUT:  # a call without training=False is random in eval mode too
            return 1.0 if self.is_identity else None
        if self.kind in (Kind.SCALE, Kind.DIVIDE):
            factor = settings["other"]
            if not isinstance(factor, int | float) or settings.get("rounding_mode") is not None:
                return None
            if self.kind is Kind.DIVIDE:
                return 1 / abs(float(factor)) if factor else None
            return abs(float(factor))
        if any(isinstance(a, torch.dtype) for a in self.args):  # x.view(dtype) reads other numbers
            return None
        if row.gain is None or not row.slope:
            return row.gain
        slope = settings[row.slope]
        return max(row.gain, abs(float(slope))) if isinstance(slope, int | float) else None

    @property
    def is_identity(self) -> bool:
        """Return whether a dropout is switched off; modules are, in eval mode."""
        return self.module is not None or self.settings["training"] is False

    def apply(self, x: Tensor) -> Tensor:
        """Compute the operation on another input."""
        call = self.call if self.module is None else self.module
        if isinstance(call, str):
            out = getattr(x, call)(*self.args, **self.kwargs)
        else:
            out = call(x, *self.args, **self.kwargs)
        assert isinstance(out, Tensor)
        return out


def step_of(node: fx.Node, module: nn.Module | None) -> Step | None:
    """Return the operation that a traced node computes; None for one that is not in the table.

    Args:
        node: a step of a traced network.
        module: the module that the node calls, if it calls one.
    """
    if module is not None:
        row = _BY_MODULE.get(type(module))
        return None if row is None else Step(row, module)
    if node.op not in ("call_function", "call_method"):
        return None
    row = _BY_CALL.get(node.target)
    return None if row is None else Step(row, None, node.target, node.args[1:], node.kwargs)
