"""Decide whether the error theorem covers a network, and compute the gain of every step.

Deviations follow the traced steps, through branches, sums and concatenations. A network is refused
with the name of the step whose Lipschitz constant is not known, such as attention or a layer norm.

A convolution or a pooling first selects patches, then maps each patch. The selection stretches the
Euclidean norm by exactly √m, where m is the largest number of patches that hold one input element.
m is counted, not assumed. A transposed convolution's patches also hold zeros. Zeros add nothing to
the norm, so the same m holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lobs.calibration.forward import call, evaluating, main_output
from lobs.certificate.bound import Link
from lobs.certificate.gates import PARTS, STACKS, VIEWS, Limits, even
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
            found = list(_walk(model, example, layers, errors, dense or {}))
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


def _walk(
    model: nn.Module,
    example: Tensor,
    layers: Mapping[str, Layer],
    errors: Mapping[str, float],
    dense: Mapping[str, Tensor],
) -> Iterator[Link]:
    """Yield a link for every step whose output may differ between the two networks."""
    traced = trace(model, example)
    if not traced.only_constants:
        raise NotAChainError("the forward pass assigns attributes or buffers")
    weights = _weights_of_pruned(model, layers, errors)
    moved: dict[fx.Node, tuple[str, ...]] = {}  # each with the steps whose memory it may share
    # Modules one after another neither add nor multiply tensors.
    calls = any(n.op in ("call_function", "call_method") for n in traced.graph.nodes)
    limits = Limits(model, traced) if calls else None
    for node in traced.graph.nodes:
        if node.op == "get_attr" and id(_attribute(model, str(node.target))) in weights:
            raise NotAChainError(f"the weight '{node.target}' is also used outside its layer")
        sources = [n for n in node.all_input_nodes if n in moved]
        if node.op == "output":
            if len(sources) != 1 or node.args[0] is not sources[0]:
                raise NotAChainError("the network returns something other than its last step")
            break
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        step = step_of(node, _module(model, node))
        if limits is not None:
            limits.see(node, step)
        if node.op == "placeholder" or _asks_size(node) or not (sources or layer is not None):
            continue
        shapes = [traced.shapes[n] for n in node.all_input_nodes if n in traced.shapes]
        factors = None if limits is None else limits.weights(node, step, moved.keys())
        if factors is None:
            link = _link(model, node, shapes, layers, errors, dense)
            takes = tuple(n.name for n in _tensors_in(node) if n in moved)
        else:
            link = Link(node.name, 1.0, 1.0)
            takes = tuple(f"{node.name} of input {i}" for i in range(len(factors)))
            for (source, weight), key in zip(factors, takes, strict=True):
                yield Link(node.name, weight, weight, key=key, takes=(source.name,))
        aliases = [key for n in sources for key in (n.name, *moved[n])]
        written = node.args[0] if node.args else None
        if step is not None and step.in_place and written not in moved:
            raise NotAChainError(f"step '{node.name}' writes into one of its inputs")
        overwrites = tuple(dict.fromkeys(aliases)) if step is not None and step.in_place else ()
        shares = node.target in (*VIEWS, *PARTS) or (step is not None and step.shares_memory)
        moved[node] = tuple(aliases) if shares else ()
        yield replace(link, key=node.name, takes=takes, overwrites=overwrites)
    true = main_output(call(model, example))
    if not (isinstance(true, Tensor) and isinstance(traced.output, Tensor)) or not torch.allclose(
        true, traced.output, rtol=1e-5, atol=1e-6 * float(true.abs().max()), equal_nan=True
    ):
        raise NotAChainError("its steps, run one by one, give another output")


def _tensors_in(node: fx.Node) -> list[fx.Node]:
    """Return the steps that a step takes, as often as it takes them: x + x moves twice as far."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _weights_of_pruned(
    model: nn.Module, layers: Mapping[str, Layer], errors: Mapping[str, float]
) -> set[int]:
    """Return the tensors of pruned layers, which no other step may read."""
    return {id(t) for name, layer in layers.items() if errors.get(name) for t in layer.tensors()}


def _attribute(model: nn.Module, path: str) -> Any:
    try:
        return attrgetter(path)(model)
    except AttributeError:
        return None


def _asks_size(node: fx.Node) -> bool:
    """Return whether a step asks for a shape or a type, which are the same in both networks."""
    named = node.op == "call_method" and node.target in ("size", "dim", "numel")
    return named or (
        node.target is getattr and node.args[1] in ("shape", "dtype", "device", "ndim")
    )


def _module(model: nn.Module, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _link(
    model: nn.Module,
    node: fx.Node,
    shapes: Sequence[torch.Size],
    layers: Mapping[str, Layer],
    errors: Mapping[str, float],
    dense: Mapping[str, Tensor],
) -> Link:
    name = str(node.target) if node.op == "call_module" else node.name
    module = _module(model, node)
    layer = layers.get(name) if module is not None else None
    if layer is not None and module is not None:
        _check_plain(layer, module)
        gains = _layer_gains(layer, shapes[0], dense.get(layer.name))
        return Link(layer.name, *gains, errors.get(layer.name, 0.0))
    step = step_of(node, module)
    if node.target in STACKS:
        return Link(name, 1.0, 1.0, joined="stack")
    if node.target in VIEWS or (node.target in PARTS and _takes_each_once(node)):
        return Link(name, 1.0, 1.0)
    alone = len(shapes) == 1 or (step is not None and len(_tensors_in(node)) == 1)
    constant = _gain(step, shapes[0]) if step is not None and alone else None
    if constant is not None:
        return Link(name, constant, constant)
    if module is not None:
        what = f"'{name}' ({type(module).__name__})"
    else:
        target: Any = node.target
        what = f"'{target if isinstance(target, str) else getattr(target, '__name__', node.op)}'"
    raise NotAChainError(f"no Lipschitz constant is known for {what}")


def _takes_each_once(node: fx.Node) -> bool:
    """Return whether an index takes no number twice: it holds whole numbers and slices only."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(isinstance(part, int | slice | type(...) | None) for part in index)


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
        case Kind.SPREAD:
            return _averaging(step.apply, shape) if step.fixed and even(step) else None
        case Kind.MEAN:
            return 1.0 if step.fixed else None  # no mean is longer than what it is taken of
        case Kind.BATCH_NORM:
            return _batch_norm(step.module)
    return step.gain


def _averaging(mean: Callable[[Tensor], Tensor], shape: torch.Size) -> float:
    """Bound the norm of a linear map without negative entries.

    It is at most √(largest row sum · largest column sum).
    """
    shape = torch.Size((1, *shape[1:]))
    rows = float(mean(torch.ones(shape)).max())
    return math.sqrt(rows * float(_column_sums(mean, shape).max()))


def _batch_norm(norm: Any) -> float | None:
    """Return the largest scale of a batch norm; None where it has no running statistics."""
    if norm.running_var is None:
        return None
    ones = torch.ones_like(norm.running_var)
    scale = ones if norm.weight is None else norm.weight.detach().abs()
    return float((scale / (norm.running_var + norm.eps).sqrt()).max())


def _max_pool(step: Step, shape: torch.Size) -> float | None:
    """Return √m for a pooling: the maximum of a patch is 1-Lipschitz, so only selecting stretches.

    Adaptive windows differ in size, so their overlaps are counted along each dimension.
    """
    settings, n = step.settings, step.operation.dimensions
    if not step.fixed:
        return None
    if "output_size" in settings:
        return _adaptive_overlap(settings["output_size"], shape[-n:])
    kernel = settings["kernel_size"]
    convolution, view = _FRAMES[n]
    stride = settings["stride"] or kernel
    frame: Any = convolution(1, 1, kernel, stride, settings["padding"], settings["dilation"])
    # Rounding up adds windows at the far edges. A larger image has at least as many windows.
    extra = [s - 1 if settings["ceil_mode"] else 0 for s in frame.stride]
    size = [length + more for length, more in zip(shape[-n:], extra, strict=True)]
    return math.sqrt(_overlap(view("pool", frame).windows, torch.Size((1, 1, *size))))


def _adaptive_overlap(sizes: Any, shape: Sequence[int]) -> float:
    """Return √m for adaptive windows, which begin at ⌊i·n/k⌋ and end at ⌈(i + 1)·n/k⌉."""
    wanted = sizes if isinstance(sizes, tuple | list) else (sizes,) * len(shape)
    most = 1
    for k, n in zip(wanted, shape, strict=True):
        count = [0] * n
        for i in range(n if k is None else k):
            for at in range(i * n // (k or n), -(-(i + 1) * n // (k or n))):
                count[at] += 1
        most *= max(count)
    return math.sqrt(most)
