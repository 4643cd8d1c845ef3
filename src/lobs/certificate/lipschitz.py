"""Is the network a chain to which the error theorem applies, and what is the gain of every step?

The forward pass is traced with `torch.fx`. Each step must take exactly the one before it; anything
else (a residual sum, a branch, an operation whose Lipschitz constant is not known here) is refused
by name. A patch-wise step, be it a convolution or a pooling, is a map on patches after a selection
of them, and that selection stretches the Euclidean norm by exactly √m, m the largest number of
patches that one input element is part of; m is counted, not assumed. A transposed convolution's
patches hold zeros besides input elements, which add nothing to the norm: the same m serves it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lobs.calibration.forward import evaluating
from lobs.certificate.bound import Link
from lobs.layers import (
    Conv1dLayer,
    Conv2dLayer,
    Conv3dLayer,
    ConvolutionLayer,
    Layer,
    WindowedLayer,
    all_layers,
    as_layer,
)
from lobs.layers.hooks import untouched
from lobs.solvers import linalg


class NotAChainError(Exception):
    """The theorem does not cover this network; the message says why."""


_ONE_LIPSCHITZ = (
    nn.ReLU, nn.ReLU6, nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.Tanh, nn.Softplus, nn.LogSigmoid,
    nn.Hardtanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Unflatten, nn.Softmax,
)  # fmt: skip
_ONE_LIPSCHITZ_CALLS: tuple[Any, ...] = (
    F.relu, torch.relu, F.relu6, torch.flatten, torch.tanh, F.tanh, F.softmax, torch.softmax,
    "flatten", "view", "reshape", "relu", "tanh", "contiguous", "softmax",
)  # fmt: skip
_MAX_POOLS: dict[int, tuple[Any, ...]] = {
    1: (F.max_pool1d, torch.max_pool1d),
    2: (F.max_pool2d, torch.max_pool2d),
    3: (F.max_pool3d, torch.max_pool3d),
}
_FRAMES: dict[int, tuple[Callable[..., nn.Module], type[ConvolutionLayer]]] = {
    1: (nn.Conv1d, Conv1dLayer),
    2: (nn.Conv2d, Conv2dLayer),
    3: (nn.Conv3d, Conv3dLayer),
}


def links(
    model: nn.Module,
    example: Tensor | None,
    errors: dict[str, float],
    dense: dict[str, Tensor] | None = None,
) -> list[Link]:
    """Describe a network as links of the error bound, or raise `NotAChainError`.

    Args:
        model: the pruned network.
        example: one input, to learn shapes from.
        errors: √E by layer, in root mean square over network samples.
        dense: dense weight matrices by layer, to take gains from where errors were measured on
            pruned inputs.
    """
    if example is None:
        raise NotAChainError("the network is called with keyword arguments")
    alone = as_layer("", model)
    if alone is not None:  # tracing looks inside a bare layer
        return [
            Link(
                "model",
                *_layer_gains(alone, example.shape, (dense or {}).get("model")),
                errors.get("model", 0.0),
            )
        ]
    found: list[Link] = []
    layers = {name: layer for layer in all_layers(model) for name in layer.names}
    try:
        with (
            evaluating(model),
            untouched(model),
        ):  # the mode in which errors were measured, and which a trace bakes in
            for node, shape in _steps(model, example):
                found.append(_link(model, node, shape, layers, errors, dense or {}))
    except NotAChainError:
        raise
    except Exception as error:  # tracing runs the user's code, which may raise anything
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotAChainError(f"the forward pass could not be traced: {first_line}") from error
    seen = [link.name for link in found if link.error > 0]
    if len(seen) != len(set(seen)):
        raise NotAChainError(
            "a pruned layer is called more than once, or shares its weight with another"
        )
    missing = [name for name, error in errors.items() if error > 0 and name not in seen]
    if missing:
        raise NotAChainError(f"pruned layer '{missing[0]}' is not a step of the chain")
    return found


def _steps(model: nn.Module, example: Tensor) -> Iterator[tuple[fx.Node, torch.Size]]:
    traced = fx.GraphModule(model, _Tracer().trace(model))
    nodes = list(traced.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder" and n.users]
    if len(inputs) != 1:
        raise NotAChainError(f"the network takes {len(inputs)} inputs")
    recorder = _Shapes(traced)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    recorder.run(example.to(device))
    before = inputs[0]
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = [
            n for n in node.all_input_nodes if isinstance(recorder.shapes.get(n.name), torch.Size)
        ]
        if not sources:  # sizes and constants
            continue
        if sources != [before]:
            raise NotAChainError(
                f"step '{node.name}' does not take just the step before it (a branch or residual "
                "sum)"
            )
        if node.name not in recorder.shapes:  # x.size(0) and the like
            continue
        yield node, recorder.shapes[before.name]
        before = node
    result = nodes[-1].args[0]
    if result is not before:
        raise NotAChainError("the network returns something other than its last step")


class _Tracer(fx.Tracer):
    """Takes every layer as one step, also one that torch did not write."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return as_layer(module_qualified_name, m) is not None or super().is_leaf_module(
            m, module_qualified_name
        )


class _Shapes(fx.Interpreter):
    """Runs a traced network and notes the shape of every tensor."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[str, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n.name] = value.shape
        return value


def _link(
    model: nn.Module,
    node: fx.Node,
    shape: torch.Size,
    layers: Mapping[str, Layer],
    errors: dict[str, float],
    dense: dict[str, Tensor],
) -> Link:
    if node.op == "call_module":
        name = str(node.target)
        module = model.get_submodule(name)
        layer = layers.get(name)
        if layer is not None:
            spectral, frobenius = _layer_gains(layer, shape, dense.get(layer.name))
            return Link(layer.name, spectral, frobenius, errors.get(layer.name, 0.0))
        constant = _module_constant(module, shape)
        if constant is None:
            raise NotAChainError(
                f"no Lipschitz constant is known for '{name}' ({type(module).__name__})"
            )
        return Link(name, constant, constant)
    if node.op in ("call_function", "call_method"):
        constant = _call_constant(node, shape)
        if constant is not None:
            return Link(node.name, constant, constant)
    what = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.op)
    )
    raise NotAChainError(f"no Lipschitz constant is known for '{what}'")


def _layer_gains(layer: Layer, shape: torch.Size, dense: Tensor | None) -> tuple[float, float]:
    matrix = (layer.matrix() if dense is None else dense)[..., : layer.columns]
    stretch = math.sqrt(_overlap(layer.windows, shape)) if isinstance(layer, WindowedLayer) else 1.0
    spectral = max(linalg.spectral_norm(group) for group in matrix)
    return stretch * spectral, stretch * linalg.frobenius_norm(matrix)


def _overlap(windows: Callable[[Tensor], Tensor], shape: torch.Size) -> int:
    """In how many patches the busiest input element takes part: the gradient of the sum of all patches."""
    return int(_column_sums(windows, shape).max())


def _column_sums(linear: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    """Column sums of a linear map: the gradient of the sum of its outputs."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(shape, requires_grad=True)
        (sums,) = torch.autograd.grad(linear(x).sum(), x)
    return sums


def _averaging(mean: Callable[[Tensor], Tensor], shape: torch.Size) -> float:
    """A linear map with no negative entries has norm at most √(largest row sum · largest column sum)."""
    shape = torch.Size((1, *shape[1:]))
    rows = float(mean(torch.ones(shape)).max())
    return math.sqrt(rows * float(_column_sums(mean, shape).max()))


def _module_constant(module: nn.Module, shape: torch.Size) -> float | None:
    match module:
        case nn.MaxPool1d() | nn.MaxPool2d() | nn.MaxPool3d():
            n = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}[type(module)]
            settings = (
                module.kernel_size,
                module.stride,
                module.padding,
                module.dilation,
                module.ceil_mode,
            )
            return _max_pool(n, shape, *settings)
        case nn.AvgPool1d() | nn.AvgPool2d() | nn.AvgPool3d():
            return _averaging(module, shape)
        case nn.AdaptiveAvgPool1d() | nn.AdaptiveAvgPool2d() | nn.AdaptiveAvgPool3d():
            return _averaging(module, shape)
        case nn.GELU():
            return 1.13  # max |Φ(x) + xφ(x)| = 1.1290, at x = √2; the tanh form's is 1.1291
        case nn.SiLU():
            return 1.1  # max |σ(x)(1 + x(1 − σ(x)))| = 1.0998
        case nn.LeakyReLU():
            return max(1.0, abs(module.negative_slope))
        case nn.ELU():
            return max(1.0, abs(module.alpha))
        case nn.Sigmoid():
            return 0.25
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d() if (
            module.running_var is not None
        ):
            scale = (
                torch.ones_like(module.running_var)
                if module.weight is None
                else module.weight.detach().abs()
            )
            return float((scale / (module.running_var + module.eps).sqrt()).max())
        case _ if isinstance(module, _ONE_LIPSCHITZ):
            return 1.0
    return None


def _call_constant(node: fx.Node, shape: torch.Size) -> float | None:
    call: Any = node.target
    if any(call is known or call == known for known in _ONE_LIPSCHITZ_CALLS):
        return 1.0
    if call is F.dropout:
        given: dict[str, Any] = (
            dict(zip(("p", "training"), node.args[1:], strict=False)) | node.kwargs
        )
        return (
            1.0 if given.get("training", True) is False else None
        )  # otherwise it is random even in eval mode
    if call in (
        F.avg_pool1d,
        F.avg_pool2d,
        F.avg_pool3d,
        F.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d,
    ):
        return _averaging(lambda x: call(x, *node.args[1:], **node.kwargs), shape)
    n = next((n for n, calls in _MAX_POOLS.items() if call in calls), None)
    if n is not None:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        given = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
        kernel = given["kernel_size"]
        settings = (
            given.get("stride") or kernel,
            given.get("padding", 0),
            given.get("dilation", 1),
        )
        return _max_pool(n, shape, kernel, *settings, bool(given.get("ceil_mode", False)))
    if node.target in (operator.mul, torch.mul) and isinstance(node.args[1], int | float):
        return abs(float(node.args[1]))
    return None


def _max_pool(
    n: int, shape: torch.Size, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> float:
    """The maximum of a patch is 1-Lipschitz, so pooling stretches by √m like any selection of patches."""
    convolution, view = _FRAMES[n]
    frame: Any = convolution(1, 1, kernel, stride, padding, dilation)
    # Rounding up adds windows at the far edges; counting on a larger image can only find as many or
    # more.
    extra = [s - 1 if ceil else 0 for s in frame.stride]
    size = [n + more for n, more in zip(shape[-n:], extra, strict=True)]
    return math.sqrt(_overlap(view("pool", frame).windows, torch.Size((1, 1, *size))))
