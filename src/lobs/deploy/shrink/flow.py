"""Which channels of which activations are constant, and which activations must keep the same channels?

The forward pass is traced with `torch.fx`. A convolution or fully-connected layer starts a new
*space* of channels; what works on each channel alone stays in the space of its input, and a sum
joins the spaces of its terms. A channel can go only from its whole space. Beside its space every
activation carries the value of each channel that is constant, NaN for those that are
not: a unit without weights gives its bias, and normalisations and activations carry such constants
on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.errors import UnsupportedLayerError
from lobs.layers.hooks import untouched
from lobs.calibration.forward import evaluating

Dense = nn.Linear | nn.Conv2d
Norm = nn.BatchNorm1d | nn.BatchNorm2d
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Softplus,
    nn.Identity, nn.Dropout, nn.Dropout2d,
)  # fmt: skip
_ELEMENTWISE_CALLS: tuple[Any, ...] = (
    F.relu, torch.relu, F.relu6, F.gelu, F.silu, F.leaky_relu, F.elu, torch.sigmoid, torch.tanh, F.hardswish,
    "relu", "relu_", "sigmoid", "tanh", "contiguous",
)  # fmt: skip
_POOLS = (nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_POOL_CALLS: tuple[Any, ...] = (
    F.max_pool2d,
    torch.max_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
)
_SUMS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
_FLATTEN: tuple[Any, ...] = (torch.flatten, "flatten")
_MEANS: tuple[Any, ...] = (torch.mean, "mean")


@dataclass(eq=False)
class Space:
    """Channels that stay or go together, and what stands against their going."""

    size: int
    fixed: str = ""
    producers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    readers: list[tuple[str, fx.Node]] = field(default_factory=list)


@dataclass(eq=False)
class Flow:
    """All activations of a traced network: their spaces, constants, and features per channel."""

    space: dict[fx.Node, Space] = field(default_factory=dict)
    constant: dict[fx.Node, Tensor] = field(default_factory=dict)
    features: dict[fx.Node, int] = field(default_factory=dict)

    def spaces(self) -> Iterator[Space]:
        """Every space once, in the order of the forward pass."""
        return iter({id(space): space for space in self.space.values()}.values())

    def join(self, one: Space, other: Space) -> None:
        """Make two spaces one."""
        if one is other:
            return
        one.fixed = one.fixed or other.fixed
        for part in ("producers", "norms", "readers"):
            getattr(one, part).extend(getattr(other, part))
        for node, space in self.space.items():
            if space is other:
                self.space[node] = one


class _Shapes(fx.Interpreter):
    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = value.shape
        return value


def trace(model: nn.Module, example: Tensor) -> Flow:
    """Follow the channels through a network, run once on an example."""
    try:
        with evaluating(model), untouched(model):
            traced = fx.symbolic_trace(model)
            recorder = _Shapes(traced)
            recorder.run(example)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedLayerError(
            f"cannot shrink this network: its forward pass could not be traced ({reason})."
        ) from error
    flow = Flow()
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    shared = {name for name in calls if calls.count(name) > 1}
    for node in traced.graph.nodes:
        if node in recorder.shapes and node.op != "output":
            _follow(flow, model, node, recorder.shapes, shared)
        elif node.op == "output":
            _fix(flow, node, "the network returns it")
        elif not _asks_batch_size(node):
            _fix(flow, node, f"'{node.name}' looks at its shape")
    return flow


def _asks_batch_size(node: fx.Node) -> bool:
    if node.target == "size":
        return bool(node.args[1:] == (0,))
    return node.target in (getattr, operator.getitem) or not node.all_input_nodes


def _fix(flow: Flow, node: fx.Node, why: str) -> None:
    for source in node.all_input_nodes:
        if source in flow.space:
            flow.space[source].fixed = flow.space[source].fixed or why


def _follow(
    flow: Flow, model: nn.Module, node: fx.Node, shapes: dict[fx.Node, torch.Size], shared: set[str]
) -> None:
    sources = [n for n in node.all_input_nodes if n in flow.space]
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if (
        isinstance(module, Dense)
        and len(sources) == 1
        and _plain(module, shapes[node], str(node.target), shared)
    ):
        _through_dense(flow, node, sources[0], module)
    elif (
        isinstance(module, Norm)
        and str(node.target) not in shared
        and module.running_mean is not None
    ):
        _through_norm(flow, node, sources[0], module)
    elif (
        node.op != "call_module"
        and node.target in _SUMS
        and len(sources) == 2
        and shapes[sources[0]] == shapes[sources[1]]
    ):
        one, other = sources
        flow.join(flow.space[one], flow.space[other])
        _carry(flow, node, one, flow.constant[one] + flow.constant[other])
    elif (
        len(sources) == 1
        and (kept := _by_channel(node, module, flow.constant[sources[0]], shapes[sources[0]]))
        is not None
    ):
        _carry(flow, node, sources[0], kept)
        channels = flow.space[node].size
        flow.features[node] = shapes[node][1] // channels
    else:
        what = (
            type(module).__name__
            if module is not None
            else getattr(node.target, "__name__", str(node.target))
        )
        _fix(
            flow, node, f"it feeds '{node.name}' ({what}), through which channels are not followed"
        )
        _start(
            flow,
            node,
            shapes[node],
            f"'{node.name}' gives it" if node.op != "placeholder" else "it is the network's input",
        )


def _plain(module: nn.Module, shape: torch.Size, name: str, shared: set[str]) -> bool:
    """One group, one call, one vector a sample: what can be cut."""
    if name in shared or type(module) not in (nn.Linear, nn.Conv2d):
        return False
    if isinstance(module, nn.Conv2d):
        return len(shape) == 4 and module.groups == 1
    return len(shape) == 2


def _start(flow: Flow, node: fx.Node, shape: torch.Size, fixed: str) -> None:
    size = shape[1] if len(shape) > 1 else 1
    flow.space[node] = Space(size, fixed)
    flow.constant[node], flow.features[node] = (
        torch.full((size,), torch.nan, dtype=torch.float64),
        1,
    )


def _carry(flow: Flow, node: fx.Node, source: fx.Node, constant: Tensor) -> None:
    flow.space[node], flow.constant[node], flow.features[node] = (
        flow.space[source],
        constant,
        flow.features[source],
    )


def _through_dense(flow: Flow, node: fx.Node, source: fx.Node, module: Dense) -> None:
    name = str(node.target)
    flow.space[source].readers.append((name, source))
    weight = module.weight.detach().flatten(1)
    flow.space[node] = Space(len(weight), producers=[name])
    bias = torch.zeros(len(weight)) if module.bias is None else module.bias.detach()
    # Inputs that are constant make no unit constant here: they are folded into the bias when they
    # go.
    flow.constant[node] = torch.where((weight == 0).all(dim=1), bias, torch.nan).to(torch.float64)
    flow.features[node] = 1


def _through_norm(flow: Flow, node: fx.Node, source: fx.Node, module: Norm) -> None:
    assert module.running_mean is not None and module.running_var is not None
    scale = (module.running_var.double() + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight.detach().double()
    shift = torch.zeros_like(scale) if module.bias is None else module.bias.detach().double()
    constant = flow.constant[source]
    if flow.features[source] == 1:
        after = (constant - module.running_mean.double()) * scale + shift
        after = torch.where(scale == 0, shift, after)
    else:  # a norm over flattened maps gives one channel several constants
        after = torch.full_like(constant, torch.nan)
    flow.space[source].norms.append(str(node.target))
    _carry(flow, node, source, after)


def _by_channel(
    node: fx.Node, module: nn.Module | None, constant: Tensor, shape: torch.Size
) -> Tensor | None:
    """Constants after a step that works on each channel alone; None if it is not known to be one."""
    rest: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    call: Any = node.target
    if isinstance(module, _ELEMENTWISE):
        return (
            constant if isinstance(module, nn.Dropout | nn.Dropout2d) else module(constant.clone())
        )
    if isinstance(module, _POOLS):
        return constant
    if isinstance(module, nn.AvgPool2d):
        whole = module.padding in (0, (0, 0)) or not module.count_include_pad
        return constant if whole else torch.where(constant == 0, constant, torch.nan)
    if isinstance(module, nn.Flatten):
        return constant if (module.start_dim, module.end_dim) == (1, -1) else None
    if module is not None or any(
        isinstance(a, fx.Node) and a.op != "call_method" for a in node.args[1:]
    ):
        return None
    if call in _ELEMENTWISE_CALLS:
        return _elementwise(call, constant, node.args[1:], rest)
    if call in _POOL_CALLS or call is F.dropout:
        return constant if call is not F.dropout or rest.get("training") is False else None
    if call in _FLATTEN:
        return constant if (*node.args[1:], *rest.values()) in ((1,), (1, -1)) else None
    if call in ("view", "reshape"):
        return (
            constant if len(node.args) == 3 and node.args[2] == -1 and node.args[1] != -1 else None
        )
    if call in _MEANS and len(shape) == 4:
        dims = node.args[1] if len(node.args) > 1 else rest.get("dim")
        return (
            constant
            if isinstance(dims, list | tuple) and sorted(int(str(d)) % 4 for d in dims) == [2, 3]
            else None
        )
    return None


def _elementwise(
    call: Any, constant: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    found = (
        getattr(constant.clone(), call)(*args, **kwargs)
        if isinstance(call, str)
        else call(constant, *args, **kwargs)
    )
    assert isinstance(found, Tensor)
    return found
