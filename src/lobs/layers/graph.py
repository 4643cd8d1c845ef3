"""Trace a network with `torch.fx`: the steps of its forward pass and the shapes between them.

This is the only place that traces. Tracing has three side effects, and each is undone here:

- `torch.fx` patches `nn.Module.__call__` and functions of `math` for the whole process. One lock
  admits one trace at a time. All patches are removed after any exception, Ctrl-C included.
- `forward` runs on proxies. Attributes and buffers that it assigns are restored.
- `forward` takes one branch for good. Arguments that the caller does not give are therefore fixed
  at their defaults. `if mask is not None` then takes the branch of a real call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace

from lobs.layers.discovery import is_plain_layer
from lobs.layers.untouched import untouched

_PATCHED_BY_FX = ("__call__", "__getattr__")
_tracing = RLock()


class TraceError(Exception):
    """Report that a network could not be traced; the message is the reason, in one line."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Hold a traced network.

    Attributes:
        graph: the steps of the forward pass.
        shapes: the shape of every step's output that is a tensor; empty without an example.
        assigns_state: whether `forward` assigned attributes or buffers. The graph may then refer
            to attributes that the network itself does not have.
    """

    graph: fx.Graph
    shapes: Mapping[fx.Node, torch.Size] = field(default_factory=dict)
    assigns_state: bool = False


def trace(
    model: nn.Module,
    example: Any = None,
    names: frozenset[str] | None = None,
    leaves: frozenset[int] = frozenset(),
) -> Trace:
    """Trace a network in its present mode, and return its steps.

    Args:
        model: any network; left as it was found.
        example: a batch to run once, for the shapes. Without one no shapes are known.
        names: the arguments the network is called with, as `argument_names` gives them. The
            names in `example` are used where there is one.
        leaves: ids of more modules that are one step each.

    Raises:
        TraceError: the forward pass cannot be traced, or fails on the example.
    """
    if example is not None:
        names = argument_names(example)
    shapes: dict[fx.Node, torch.Size] = {}
    try:
        with untouched(model) as changed:
            with _patches_removed(model):
                graph = _Tracer(names, leaves).trace(model)
            if example is not None:
                shapes = _shapes(model, graph, arguments(graph, example, device_of(model)))
    except Exception as error:  # tracing runs the user's code, which may raise anything
        text = str(error).strip() or type(error).__name__
        raise TraceError(text.splitlines()[0]) from error
    return Trace(graph, shapes, bool(changed))


def argument_names(batch: Any) -> frozenset[str] | None:
    """Return the names of the arguments in a batch; None stands for the first argument alone."""
    return frozenset(map(str, batch)) if isinstance(batch, Mapping) else None


def arguments(graph: fx.Graph, batch: Any, device: torch.device) -> dict[fx.Node, Any]:
    """Return the value of every placeholder for one batch; absent arguments have defaults.

    Args:
        graph: a traced network.
        batch: a tensor, a tuple whose first item is the input, or a mapping.
        device: where tensors are copied to.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if isinstance(batch, tuple | list):
        batch = batch[0]
    given = batch if isinstance(batch, Mapping) else {placeholders[0].target: batch}
    values = {n: given.get(n.target, n.args[0] if n.args else None) for n in placeholders}
    return {n: v.to(device, copy=True) if isinstance(v, Tensor) else v for n, v in values.items()}


class _Tracer(fx.Tracer):
    """Trace with every layer that `lobs` knows as one step, and absent arguments as constants."""

    def __init__(self, names: frozenset[str] | None, leaves: frozenset[int]) -> None:
        super().__init__()
        self.names, self.leaves = names, leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            is_plain_layer(m)
            or id(m) in self.leaves
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        proxies = [a for a in args if isinstance(a, fx.Proxy)]
        targets = [str(proxy.node.target) for proxy in proxies]
        names = frozenset(targets[:1]) if self.names is None else self.names
        if not names <= {t for t in targets if not t.startswith("*")}:
            raise TraceError("an argument is passed on through *args or **kwargs")
        fixed = {
            id(p): _default(p.node) for p, t in zip(proxies, targets, strict=True) if t not in names
        }
        return function, [fixed.get(id(a), a) for a in args]


def _default(placeholder: fx.Node) -> Any:
    target = str(placeholder.target)
    if target.startswith("*"):
        return {} if target.startswith("**") else ()
    if not placeholder.args:
        raise TraceError(f"argument '{target}' is missing")
    return placeholder.args[0]


class _ShapeRecorder(fx.Interpreter):
    """Run a traced network and record the shape of every tensor."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = value.shape
        return value


def _shapes(
    model: nn.Module, graph: fx.Graph, values: dict[fx.Node, Any]
) -> dict[fx.Node, torch.Size]:
    recorder = _ShapeRecorder(fx.GraphModule(model, graph))
    given = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
    recorder.run(initial_env=values, enable_io_processing=False)
    return given | recorder.shapes


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's first parameter that has data; else the CPU."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


@contextmanager
def _patches_removed(model: nn.Module) -> Iterator[None]:
    """Admit one trace at a time, and remove all patches of `torch.fx` afterwards.

    `torch.fx` removes them too, unless Ctrl-C arrives while it does so.
    """
    with _tracing:
        methods = {name: nn.Module.__dict__[name] for name in _PATCHED_BY_FX}
        functions = [(n, {k: f for k, f in n.items() if callable(f)}) for n in _namespaces(model)]
        patcher = getattr(_symbolic_trace, "CURRENT_PATCHER", None)
        try:
            yield
        finally:
            for name, method in methods.items():
                if nn.Module.__dict__[name] is not method:
                    setattr(nn.Module, name, method)
            for namespace, own in functions:
                for name, function in own.items():
                    if getattr(namespace.get(name), "__wrapped__", None) is function:
                        namespace[name] = function
            if hasattr(_symbolic_trace, "CURRENT_PATCHER"):
                _symbolic_trace.CURRENT_PATCHER = patcher


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the namespaces in which `torch.fx` wraps the functions of `math`."""
    found = [vars(math)]
    found += [getattr(module.forward, "__globals__", {}) for module in model.modules()]
    return iter({id(namespace): namespace for namespace in found}.values())
