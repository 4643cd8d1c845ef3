"""Decide whether the error theorem covers a network, and compute the gain of every step.

The network must be a chain: each traced step takes exactly the output of the step before it. Any
other network is refused with the name of the step: a residual sum, a branch, or an operation whose
Lipschitz constant is not known.

A convolution or a pooling first selects patches, then maps each patch. The selection stretches the
Euclidean norm by exactly √m, where m is the largest number of patches that hold one input element.
m is counted, not assumed. A transposed convolution's patches also hold zeros. Zeros add nothing to
the norm, so the same m holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
from lobs.layers.discovery import is_plain_layer
from lobs.layers.graph import TraceError, trace
from lobs.layers.operations import Kind, Step, step_of
from lobs.solvers import linalg


class NotAChainError(Exception):
    """Report that the theorem does not cover a network; the message is the reason."""


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
        example: one input, for the shapes.
        errors: √E by layer, in root mean square over network samples.
        dense: dense weight matrices by layer. Gains come from them where errors were measured on
            pruned inputs.
    """
    if example is None:
        raise NotAChainError("the network is called with keyword arguments")
    alone = as_layer("", model)
    if alone is not None:  # tracing would look inside a bare layer
        _check_plain(alone, model)
        gains = _layer_gains(alone, example.shape, (dense or {}).get("model"))
        return [Link("model", *gains, errors.get("model", 0.0))]
    layers = {name: layer for layer in all_layers(model) for name in layer.names}
    try:
        # Errors were measured in eval mode, and a trace is valid for one mode only.
        with evaluating(model):
            found = [
                _link(model, node, shape, layers, errors, dense or {})
                for node, shape in _steps(model, example)
            ]
    except NotAChainError:
        raise
    except TraceError as error:
        raise NotAChainError(f"the forward pass could not be traced: {error}") from error
    except Exception as error:  # modules of the network may raise anything
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotAChainError(f"a gain could not be computed: {first_line}") from error
    _check_once(found, errors)
    return found


def _check_once(found: list[Link], errors: Mapping[str, float]) -> None:
    """Refuse a chain in which a pruned layer does not occur exactly once."""
    seen = [link.name for link in found if link.error > 0]
    if len(seen) != len(set(seen)):
        raise NotAChainError(
            "a pruned layer is called more than once, or shares its weight with another"
        )
    missing = [name for name, error in errors.items() if error > 0 and name not in seen]
    if missing:
        raise NotAChainError(f"pruned layer '{missing[0]}' is not a step of the chain")


def _steps(model: nn.Module, example: Tensor) -> Iterator[tuple[fx.Node, torch.Size]]:
    """Yield the steps of a chain, each with the shape of its input."""
    traced = trace(model, example)
    nodes, shapes = list(traced.graph.nodes), traced.shapes
    inputs = [n for n in nodes if n.op == "placeholder" and n.users]
    if len(inputs) != 1:
        raise NotAChainError(f"the network takes {len(inputs)} inputs")
    before = inputs[0]
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = [n for n in node.all_input_nodes if n in shapes]
        if not sources:  # sizes and constants
            continue
        if sources != [before]:
            raise NotAChainError(
                f"step '{node.name}' does not take just the step before it (a branch or residual "
                "sum)"
            )
        if node not in shapes:  # x.size(0) and the like
            continue
        yield node, shapes[before]
        before = node
    if nodes[-1].args[0] is not before:
        raise NotAChainError("the network returns something other than its last step")


def _link(
    model: nn.Module,
    node: fx.Node,
    shape: torch.Size,
    layers: Mapping[str, Layer],
    errors: Mapping[str, float],
    dense: Mapping[str, Tensor],
) -> Link:
    name = str(node.target) if node.op == "call_module" else node.name
    module = model.get_submodule(name) if node.op == "call_module" else None
    layer = layers.get(name) if module is not None else None
    if layer is not None and module is not None:
        _check_plain(layer, module)
        gains = _layer_gains(layer, shape, dense.get(layer.name))
        return Link(layer.name, *gains, errors.get(layer.name, 0.0))
    step = step_of(node, module)
    constant = None if step is None else _gain(step, shape)
    if constant is not None:
        return Link(name, constant, constant)
    if module is not None:
        what = f"'{name}' ({type(module).__name__})"
    else:
        target: Any = node.target
        what = f"'{target if isinstance(target, str) else getattr(target, '__name__', node.op)}'"
    raise NotAChainError(f"no Lipschitz constant is known for {what}")


def _check_plain(layer: Layer, module: nn.Module) -> None:
    """Refuse a layer whose class or instance overrides the forward pass."""
    if not is_plain_layer(module):
        raise NotAChainError(
            f"layer '{layer.name}' ({type(module).__name__}) computes its output in its own way"
        )


def _layer_gains(layer: Layer, shape: torch.Size, dense: Tensor | None) -> tuple[float, float]:
    """Return the spectral and the Frobenius gain of a layer on inputs of a shape."""
    matrix = (layer.matrix() if dense is None else dense)[..., : layer.columns]
    stretch = math.sqrt(_overlap(layer.windows, shape)) if isinstance(layer, WindowedLayer) else 1.0
    spectral = max(linalg.spectral_norm(group) for group in matrix)
    return stretch * spectral, stretch * linalg.frobenius_norm(matrix)


def _overlap(windows: Callable[[Tensor], Tensor], shape: torch.Size) -> int:
    """Return the largest number of patches that hold one input element.

    It is the largest entry in the gradient of the sum of all patches.
    """
    return int(_column_sums(windows, shape).max())


def _column_sums(linear: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    """Return the column sums of a linear map: the gradient of the sum of its outputs."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(shape, requires_grad=True)
        (sums,) = torch.autograd.grad(linear(x).sum(), x)
    return sums


def _gain(step: Step, shape: torch.Size) -> float | None:
    """Return a Lipschitz constant of a step on inputs of a shape; None where none is known."""
    match step.kind:
        case Kind.MAX_POOL:
            return _max_pool(step, shape)
        case Kind.AVERAGE_POOL:
            return _averaging(step.apply, shape) if step.fixed else None
        case Kind.BATCH_NORM:
            assert isinstance(step.module, _BatchNorm)
            return _batch_norm(step.module)
    return step.gain


def _averaging(mean: Callable[[Tensor], Tensor], shape: torch.Size) -> float:
    """Bound the norm of a linear map without negative entries.

    It is at most √(largest row sum · largest column sum).
    """
    shape = torch.Size((1, *shape[1:]))
    rows = float(mean(torch.ones(shape)).max())
    return math.sqrt(rows * float(_column_sums(mean, shape).max()))


def _batch_norm(norm: _BatchNorm) -> float | None:
    """Return the largest scale of a batch norm; None where it has no running statistics."""
    if norm.running_var is None:
        return None
    ones = torch.ones_like(norm.running_var)
    scale = ones if norm.weight is None else norm.weight.detach().abs()
    return float((scale / (norm.running_var + norm.eps).sqrt()).max())


def _max_pool(step: Step, shape: torch.Size) -> float | None:
    """Return √m for a pooling: the maximum of a patch is 1-Lipschitz, so only selecting stretches.

    None where the windows are not known, as in adaptive pooling.
    """
    settings = step.settings
    kernel = settings.get("kernel_size")
    if kernel is None or not step.fixed:
        return None
    n = step.operation.dimensions
    convolution, view = _FRAMES[n]
    stride = settings["stride"] or kernel
    frame: Any = convolution(1, 1, kernel, stride, settings["padding"], settings["dilation"])
    # Rounding up adds windows at the far edges. A larger image has at least as many windows.
    extra = [s - 1 if settings["ceil_mode"] else 0 for s in frame.stride]
    size = [length + more for length, more in zip(shape[-n:], extra, strict=True)]
    return math.sqrt(_overlap(view("pool", frame).windows, torch.Size((1, 1, *size))))
