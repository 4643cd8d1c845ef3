"""Follow channels through a network: which are constant, and which must stay or go together.

A convolution or fully-connected layer starts a new *space* of channels. A step that works on each
channel alone stays in the space of its input. A sum joins the spaces of its terms. A channel can
only be removed from its whole space.

Every activation also carries the value of each channel that is constant, and NaN for the others. A
unit without weights gives its bias. Normalisations and activations pass such constants on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lobs.calibration.forward import evaluating
from lobs.errors import UnsupportedLayerError
from lobs.layers.graph import Trace, TraceError, trace
from lobs.layers.operations import Kind, Step, step_of

Dense = nn.Linear | nn.Conv2d
Norm = nn.BatchNorm1d | nn.BatchNorm2d


@dataclass(eq=False)
class Space:
    """Hold channels that stay or go together.

    Attributes:
        size: number of channels.
        fixed: why no channel can be removed; empty where channels can.
        producers: names of the layers that compute the channels.
        norms: names of the batch norms that scale them.
        readers: names of the layers that take them as input, and the activation that each takes.
    """

    size: int
    fixed: str = ""
    producers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    readers: list[tuple[str, fx.Node]] = field(default_factory=list)


@dataclass(eq=False)
class Flow:
    """Hold all activations of a traced network: their spaces, constants, and features per channel.

    `origin` maps an activation to the earliest activation that may share its memory.
    """

    space: dict[fx.Node, Space] = field(default_factory=dict)
    constant: dict[fx.Node, Tensor] = field(default_factory=dict)
    features: dict[fx.Node, int] = field(default_factory=dict)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def spaces(self) -> Iterator[Space]:
        """Yield every space once, in the order of the forward pass."""
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

    def start(self, node: fx.Node, size: int, fixed: str = "") -> Space:
        """Put a node into a new space without constants, and return the space.

        Args:
            node: a step of the traced network.
            size: number of channels.
            fixed: why no channel can be removed; empty where channels can.
        """
        self.space[node] = Space(size, fixed)
        self.constant[node] = torch.full((size,), torch.nan, dtype=torch.float64)
        self.features[node] = 1
        return self.space[node]

    def carry(self, node: fx.Node, source: fx.Node, constant: Tensor) -> None:
        """Put a node into the space of its input, with new constants.

        Args:
            node: a step that works on each channel alone.
            source: its input.
            constant: value of every channel after the step; NaN where it is not constant.
        """
        self.space[node], self.constant[node] = self.space[source], constant
        self.features[node] = self.features[source]

    def fix(self, node: fx.Node, reason: str) -> None:
        """Keep all channels that a node reads."""
        for source in node.all_input_nodes:
            if source in self.space:
                self.space[source].fixed = self.space[source].fixed or reason

    def overwrite(self, source: fx.Node, node: fx.Node) -> None:
        """Drop the constants of activations whose memory a step overwrites.

        An activation that only leads to the step is read by no other step, so it keeps its own.
        """
        memory = self.origin.get(source, source)
        shared = [n for n in self.constant if self.origin.get(n, n) is memory and n is not node]
        if all(len(n.users) == 1 for n in shared):
            return
        for other in shared:
            same = self.constant[other] == self.constant[node]
            self.constant[other] = torch.where(same, self.constant[other], torch.nan)


def follow(model: nn.Module, example: Any) -> Flow:
    """Trace a network, run it once on an example, and return the flow of its channels."""
    try:
        with evaluating(model):
            traced = trace(model, example)
    except TraceError as error:
        raise UnsupportedLayerError(
            f"cannot shrink this network: its forward pass could not be traced ({error})."
        ) from error
    flow = Flow()
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    shared = {name for name in calls if calls.count(name) > 1}
    for node in traced.graph.nodes:
        if node in traced.shapes and node.op != "output":
            _follow(flow, model, node, traced, shared)
        elif node.op == "output":
            flow.fix(node, "the network returns it")
        elif _reads_channels(node):
            flow.fix(node, f"'{node.name}' looks at its shape")
    return flow


def _reads_channels(node: fx.Node) -> bool:
    """Return whether a step that gives no tensor may depend on the number of channels."""
    if _is_shape(node):
        return not all(_is_batch_size(user) for user in node.users)
    if node.target in (getattr, operator.getitem):  # x.device and the like; items of a shape
        return False
    return bool(node.all_input_nodes) and not _is_batch_size(node)


def _is_shape(node: Any) -> bool:
    """Return whether a node is `x.shape` or `x.size()`."""
    if not isinstance(node, fx.Node):
        return False
    return node.args[1:] == (() if node.target == "size" else ("shape",)) and (
        node.target in (getattr, "size")
    )


def _is_batch_size(node: Any) -> bool:
    """Return whether a node is `x.size(0)` or `x.shape[0]`."""
    if not isinstance(node, fx.Node) or node.args[1:] != (0,):
        return False
    return node.target == "size" or (node.target is operator.getitem and _is_shape(node.args[0]))


def _follow(flow: Flow, model: nn.Module, node: fx.Node, traced: Trace, shared: set[str]) -> None:
    """Put one node into a space, with its constants."""
    name, shape = str(node.target), traced.shapes[node]
    sources = [n for n in node.all_input_nodes if n in flow.space]
    module = model.get_submodule(name) if node.op == "call_module" else None
    step = step_of(node, module)
    if len(sources) == 1 and isinstance(module, Dense) and _can_be_cut(module, shape, name, shared):
        _through_dense(flow, node, sources[0], module)
    elif len(sources) == 1 and isinstance(module, Norm) and name not in shared and _fixed(module):
        _through_norm(flow, node, sources[0], module)
    elif step is not None and _is_sum(step, sources, traced):
        flow.join(flow.space[sources[0]], flow.space[sources[1]])
        flow.carry(node, sources[0], flow.constant[sources[0]] + flow.constant[sources[1]])
    elif (
        step is not None
        and len(sources) == 1
        and (constant := _by_channel(step, flow.constant[sources[0]], node, sources[0], traced))
        is not None
    ):
        flow.carry(node, sources[0], constant)
        flow.features[node] = shape[1] // flow.space[node].size
    else:  # all channels of the space stay, so nothing more need be known about it
        _start(flow, node, module, shape)
        return
    if step is not None and step.shares_memory:
        flow.origin[node] = flow.origin.get(sources[0], sources[0])
    if step is not None and step.in_place:
        flow.overwrite(sources[0], node)


def _start(flow: Flow, node: fx.Node, module: nn.Module | None, shape: torch.Size) -> None:
    """Start a space that no channel can be removed from, after a step of unknown kind."""
    target: Any = node.target
    what = type(module).__name__ if module else getattr(target, "__name__", str(target))
    flow.fix(node, f"it feeds '{node.name}' ({what}), through which channels are not followed")
    given = node.op == "placeholder"
    reason = "it is the network's input" if given else f"'{node.name}' gives it"
    flow.start(node, shape[1] if len(shape) > 1 else 1, reason)


def _can_be_cut(module: nn.Module, shape: torch.Size, name: str, shared: set[str]) -> bool:
    """Return whether a layer has one group, one call, and one vector or image per sample."""
    if name in shared or type(module) not in (nn.Linear, nn.Conv2d):
        return False
    if isinstance(module, nn.Conv2d):
        return len(shape) == 4 and module.groups == 1
    return len(shape) == 2


def _fixed(norm: Norm) -> bool:
    """Return whether a batch norm has running statistics, and so one scale per channel."""
    return norm.running_mean is not None and norm.running_var is not None


def _is_sum(step: Step, sources: list[fx.Node], traced: Trace) -> bool:
    """Return whether a step is the plain sum of two activations of one shape."""
    if step.kind is not Kind.SUM or len(sources) != 2 or step.settings["alpha"] != 1:
        return False
    return traced.shapes[sources[0]] == traced.shapes[sources[1]]


def _through_dense(flow: Flow, node: fx.Node, source: fx.Node, module: Dense) -> None:
    name = str(node.target)
    flow.space[source].readers.append((name, source))
    weight = module.weight.detach().flatten(1)
    flow.start(node, len(weight)).producers.append(name)
    bias = torch.zeros(len(weight)) if module.bias is None else module.bias.detach()
    # Constant inputs make no unit constant here: they move into the bias when they are removed.
    flow.constant[node] = torch.where((weight == 0).all(dim=1), bias, torch.nan).to(torch.float64)


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
    flow.carry(node, source, after)


def _by_channel(
    step: Step, constant: Tensor, node: fx.Node, source: fx.Node, traced: Trace
) -> Tensor | None:
    """Return the constants after a step that works on each channel alone; None after any other."""
    before, after = traced.shapes[source], traced.shapes[node]
    settings = step.settings
    match step.kind:
        case Kind.IDENTITY:
            return constant
        case Kind.ELEMENTWISE if step.fixed:
            # Some functions turn NaN into a number, but what was not constant is not constant.
            return torch.where(constant.isnan(), torch.nan, step.apply(constant.clone()))
        case Kind.DROPOUT if step.is_identity:
            return constant
        case Kind.MAX_POOL if _pools_images(step, before):
            return constant
        case Kind.AVERAGE_POOL if _pools_images(step, before):
            even = _averages_evenly(settings)
            return constant if even else torch.where(constant == 0, constant, torch.nan)
        case Kind.FLATTEN if (settings["start_dim"], settings["end_dim"]) == (1, -1):
            return constant
        case Kind.RESHAPE if _flattens(step) and before[0] == after[0]:
            return constant
        case Kind.MEAN if len(before) == 4 and _over_positions(settings["dim"]):
            return constant
    return None


def _flattens(step: Step) -> bool:
    """Return whether a call is `view(n, -1)`, with n a number or the batch size."""
    if len(step.args) != 2 or step.args[1] != -1:
        return False
    return isinstance(step.args[0], int) or _is_batch_size(step.args[0])


def _pools_images(step: Step, shape: torch.Size) -> bool:
    return step.operation.dimensions == 2 and len(shape) == 4


def _averages_evenly(settings: dict[str, Any]) -> bool:
    """Return whether the mean of a constant image is the constant, at its borders too."""
    if settings.get("divisor_override") is not None:
        return False
    return settings.get("padding", 0) in (0, (0, 0)) or not settings["count_include_pad"]


def _over_positions(dims: Any) -> bool:
    """Return whether these dimensions of a batch of images are its two last."""
    if not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
        return False
    return sorted(d % 4 for d in dims) == [2, 3]
