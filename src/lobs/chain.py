"""Is the network a chain to which the error theorem applies, and what is the gain of every step?

The forward pass is traced with `torch.fx`. Each step must take exactly the one before it; anything else (a residual
sum, a branch, an operation whose Lipschitz constant is not known here) is refused by name. A patch-wise step, be it a
convolution or a pooling, is a map on patches after a selection of them, and that selection stretches the Euclidean norm by
exactly √m, m the largest number of patches that one input element is part of; m is counted, not assumed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs import linalg
from lobs.bounds import Link
from lobs.layers import Conv2dLayer, Layer, as_layer


class NotAChainError(Exception):
    """The theorem does not cover this network; the message says why."""


_ONE_LIPSCHITZ = (
    nn.ReLU, nn.ReLU6, nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.Tanh, nn.Softplus, nn.LogSigmoid,
    nn.Hardtanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Unflatten, nn.Softmax,
)  # fmt: skip
_ONE_LIPSCHITZ_CALLS: tuple[Any, ...] = (
    F.relu, torch.relu, F.relu6, torch.flatten, F.dropout, torch.tanh, F.tanh, F.softmax, torch.softmax,
    "flatten", "view", "reshape", "relu", "tanh", "contiguous", "softmax",
)  # fmt: skip


def links(
    model: nn.Module, example: Tensor | None, errors: dict[str, float], dense: dict[str, Tensor] | None = None
) -> list[Link]:
    """Describe a network as links of the error bound, or raise `NotAChainError`.

    Args:
        model: the pruned network.
        example: one input, to learn shapes from.
        errors: √E by layer, in root mean square over network samples.
        dense: dense weight matrices by layer, to take gains from where errors were measured on pruned inputs.
    """
    if example is None:
        raise NotAChainError("the network is called with keyword arguments")
    alone = as_layer("model", model)
    if alone is not None:  # tracing looks inside a bare layer
        return [Link("model", *_layer_gains(alone, example.shape, (dense or {}).get("model")), errors.get("model", 0.0))]
    found: list[Link] = []
    try:
        for node, shape in _steps(model, example):
            found.append(_link(model, node, shape, errors, dense or {}))
    except NotAChainError:
        raise
    except Exception as error:  # tracing runs the user's code, which may raise anything
        raise NotAChainError(f"the forward pass could not be traced: {error}") from error
    seen = [link.name for link in found if link.error > 0]
    if len(seen) != len(set(seen)):
        raise NotAChainError("a pruned layer is called more than once")
    missing = [name for name, error in errors.items() if error > 0 and name not in seen]
    if missing:
        raise NotAChainError(f"pruned layer '{missing[0]}' is not a step of the chain")
    return found


def _steps(model: nn.Module, example: Tensor) -> Iterator[tuple[fx.Node, torch.Size]]:
    traced = fx.symbolic_trace(model)
    nodes = list(traced.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder" and n.users]
    if len(inputs) != 1:
        raise NotAChainError(f"the network takes {len(inputs)} inputs")
    recorder = _Shapes(traced)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = traced.training
    try:
        with torch.no_grad():
            traced.eval()
            recorder.run(example.to(device))
    finally:
        traced.train(training)
    before = inputs[0]
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = [n for n in node.all_input_nodes if isinstance(recorder.shapes.get(n.name), torch.Size)]
        if not sources:  # sizes and constants
            continue
        if sources != [before]:
            raise NotAChainError(f"step '{node.name}' does not take just the step before it (a branch or residual sum)")
        if node.name not in recorder.shapes:  # x.size(0) and the like
            continue
        yield node, recorder.shapes[before.name]
        before = node
    result = nodes[-1].args[0]
    if result is not before:
        raise NotAChainError("the network returns something other than its last step")


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


def _link(model: nn.Module, node: fx.Node, shape: torch.Size, errors: dict[str, float], dense: dict[str, Tensor]) -> Link:
    if node.op == "call_module":
        name = str(node.target)
        module = model.get_submodule(name)
        layer = as_layer(name, module)
        if layer is not None:
            spectral, frobenius = _layer_gains(layer, shape, dense.get(name))
            return Link(name, spectral, frobenius, errors.get(name, 0.0))
        constant = _module_constant(module, shape)
        if constant is None:
            raise NotAChainError(f"no Lipschitz constant is known for '{name}' ({type(module).__name__})")
        return Link(name, constant, constant)
    if node.op in ("call_function", "call_method"):
        constant = _call_constant(node, shape)
        if constant is not None:
            return Link(node.name, constant, constant)
    what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.op)
    raise NotAChainError(f"no Lipschitz constant is known for '{what}'")


def _layer_gains(layer: Layer, shape: torch.Size, dense: Tensor | None) -> tuple[float, float]:
    matrix = (layer.matrix() if dense is None else dense)[..., : layer.columns]
    stretch = math.sqrt(_overlap(layer.windows, shape)) if isinstance(layer, Conv2dLayer) else 1.0
    spectral = max(linalg.spectral_norm(group) for group in matrix)
    return stretch * spectral, stretch * float(matrix.to(torch.float64).norm())


def _overlap(windows: Callable[[Tensor], Tensor], shape: torch.Size) -> int:
    """In how many patches the busiest input element takes part: the gradient of the sum of all patches."""
    with torch.enable_grad():
        x = torch.zeros(shape, requires_grad=True)
        (counts,) = torch.autograd.grad(windows(x).sum(), x)
    return int(counts.max())


def _module_constant(module: nn.Module, shape: torch.Size) -> float | None:
    match module:
        case nn.MaxPool2d():
            return _pool(shape, module.kernel_size, module.stride, module.padding, module.dilation, average=False)
        case nn.AvgPool2d() if module.divisor_override is None and module.count_include_pad:
            return _pool(shape, module.kernel_size, module.stride, module.padding, 1, average=True)
        case nn.LeakyReLU():
            return max(1.0, abs(module.negative_slope))
        case nn.ELU():
            return max(1.0, abs(module.alpha))
        case nn.Sigmoid():
            return 0.25
        case nn.BatchNorm1d() | nn.BatchNorm2d() if module.running_var is not None:
            scale = torch.ones_like(module.running_var) if module.weight is None else module.weight.detach().abs()
            return float((scale / (module.running_var + module.eps).sqrt()).max())
        case _ if isinstance(module, _ONE_LIPSCHITZ):
            return 1.0
    return None


def _call_constant(node: fx.Node, shape: torch.Size) -> float | None:
    if any(node.target is known or node.target == known for known in _ONE_LIPSCHITZ_CALLS):
        return 1.0
    if node.target in (F.max_pool2d, torch.max_pool2d):
        given = dict(zip(("kernel_size", "stride", "padding", "dilation"), node.args[1:], strict=False)) | node.kwargs
        kernel: Any = given["kernel_size"]
        stride: Any = given.get("stride") or kernel
        return _pool(shape, kernel, stride, given.get("padding", 0), given.get("dilation", 1), average=False)
    if node.target in (operator.mul, torch.mul) and isinstance(node.args[1], int | float):
        return abs(float(node.args[1]))
    return None


def _pool(shape: torch.Size, kernel: Any, stride: Any, padding: Any, dilation: Any, *, average: bool) -> float:
    """Pooling maps each patch with constant 1 (maximum) or 1/√size (mean)."""
    frame = nn.Conv2d(1, 1, kernel, stride, padding, dilation)
    overlap = _overlap(Conv2dLayer("pool", frame).windows, torch.Size((1, 1, *shape[-2:])))
    return math.sqrt(overlap / (math.prod(frame.kernel_size) if average else 1))
