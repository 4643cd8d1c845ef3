"""Trace a network with `torch.fx`: the steps of its forward pass and the shapes between them.

This is the only place that traces. `torch.fx` by itself patches `nn.Module.__call__` and functions
of `math` for the whole process, which breaks networks that run in other threads. Here a copy of the
network is traced instead, and only the copy is changed:

- Its modules record their calls, and its parameters are recorded when they are read.
- Its code runs in copies of its namespaces, where functions of `math` accept traced values.
- What `forward` assigns to attributes and buffers goes with the copy. Parameters are shared.

`forward` takes one branch for good. Arguments that the caller does not give are therefore fixed at
their defaults. `if mask is not None` then takes the branch of a real call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace

from lobs.layers.discovery import is_plain_layer
from lobs.layers.untouched import copied


class TraceError(Exception):
    """Report that a network could not be traced; the message is the reason, in one line."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Hold a traced network.

    Attributes:
        graph: the steps of the forward pass.
        shapes: the shape of every step's output that is a tensor; empty without an example.
        output: what the steps give for the example; None without one.
        assigns_state: whether `forward` assigned attributes or buffers. The graph may then refer
            to attributes that the network itself does not have.
        constants: tensors that the forward pass computes from buffers alone, by attribute.
        only_constants: whether nothing else was assigned.
    """

    graph: fx.Graph
    shapes: Mapping[fx.Node, torch.Size] = field(default_factory=dict)
    assigns_state: bool = False
    output: Any = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    only_constants: bool = True


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
    if model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model):
        raise TraceError("hooks or another forward were placed on the network itself")
    shapes: dict[fx.Node, torch.Size] = {}
    output = None
    try:
        twin = copied(model, share=model.parameters())
        steps = {name for name, module in model.named_modules() if id(module) in leaves}
        tracer = _Tracer(names, steps)
        graph = tracer.trace(twin)
        if example is not None:
            shapes, output = _shapes(twin, graph, arguments(graph, example, device_of(model)))
    except Exception as error:  # tracing runs the user's code, which may raise anything
        text = str(error).strip() or type(error).__name__
        raise TraceError(text.splitlines()[0]) from error
    return Trace(
        graph, shapes, tracer.assigns_state, output, tracer.constants, tracer.only_constants
    )


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

    def __init__(self, names: frozenset[str] | None, steps: set[str]) -> None:
        super().__init__()
        self.names, self.steps = names, steps
        self.assigns_state, self.only_constants = False, True
        self.constants: dict[str, Tensor] = {}
        self.parameter_steps: dict[str, fx.Proxy] = {}
        self.leaves: set[nn.Module] = set()
        self.places: dict[int, tuple[str, dict[str, Any], str]] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a network that may be changed, without patching anything else."""
        self.root, self.root_module_name = root, root._get_name()
        self.submodule_paths = {module: name for name, module in root.named_modules()}
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {
            value: f"{name}.{key}" if name else key
            for module, name in self.submodule_paths.items()
            for key, value in vars(module).items()
            if isinstance(value, Tensor | torch.ScriptObject)
        }
        for module, path in self.submodule_paths.items():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    place = f"{path}.{key}" if path else key, table, key
                    self.places.setdefault(id(tensor), place)
        names = self.submodule_paths.items()
        self.leaves = {m for m, n in names if m is not root and self._is_one_step(m, n)}
        namespaces = _Namespaces()
        before = [(m, self._prepare(m, namespaces)) for m in self.submodule_paths]
        snapshot = [(m, dict(vars(m)), dict(m._buffers)) for m in self.submodule_paths]
        function = namespaces.function(type(root).forward)
        function, args = self.create_args_for_root(function, True, concrete_args)
        self.create_node("output", "output", (self.create_arg(function(*args)),), {})
        self.constants = {
            name: value
            for name, value in vars(root).items()
            if name.startswith("_tensor_constant") and isinstance(value, Tensor)
        }
        self.only_constants = all(
            _same_items(_without(vars(m), self.constants), own) and _same_items(m._buffers, buffers)
            for m, own, buffers in snapshot
        )
        self.assigns_state = bool(self.constants) or not self.only_constants
        for module, undo in before:
            undo(vars(module))
        return self.graph

    def _prepare(
        self, module: nn.Module, namespaces: _Namespaces
    ) -> Callable[[dict[str, Any]], None]:
        """Make a module record its calls and its parameters; return the function that undoes it."""
        own = vars(module)
        parameters = own["_parameters"]
        added: dict[str, Any] = {"_compiled_call_impl": partial(self._called, module)}
        if module not in self.leaves:
            methods = namespaces.methods(type(module))
            added |= {n: MethodType(f, module) for n, f in methods.items() if n not in own}
        before = {name: own[name] for name in added if name in own}
        own.update(added)
        own["_parameters"] = _Recording(parameters, self)

        def undo(now: dict[str, Any]) -> None:
            for name in added:
                now.pop(name, None)
            now.update(before, _parameters=parameters)

        return undo

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.call_module(module, module._call_impl, args, kwargs)

    def _is_one_step(self, module: nn.Module, name: str) -> bool:
        known = is_plain_layer(module) or name in self.steps
        return known or super().is_leaf_module(module, name)

    def create_arg(self, a: Any) -> Any:
        """Return a tensor of the network as a step; `torch.fx` searches all of them each time."""
        if isinstance(a, Tensor) and (place := self.places.get(id(a))) is not None:
            name, table, key = place
            if table.get(key) is a:
                return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a parameter as a step, found as in `create_arg`."""
        if isinstance(attr_val, nn.Parameter) and (place := self.places.get(id(attr_val))):
            name, table, key = place
            if table.get(key) is attr_val:
                if name not in parameter_proxy_cache:
                    parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
                return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves

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


class _Recording(dict[str, Any]):
    """A module's parameters, each of which becomes a step of the graph when it is read."""

    def __init__(self, parameters: Mapping[str, Any], tracer: _Tracer) -> None:
        super().__init__(parameters)
        self.tracer = tracer

    def __getitem__(self, name: str) -> Any:
        return self.tracer.getattr(name, super().__getitem__(name), self.tracer.parameter_steps)


class _Namespaces:
    """Copies of the namespaces of a network's code, in which wrapped functions become steps.

    Wrapped are the functions of `math` and those that were registered with `torch.fx.wrap`.
    """

    def __init__(self) -> None:
        self._copies: dict[int, dict[str, Any]] = {}
        self._wrapped: dict[int, Any] = {
            id(f): _symbolic_trace._create_wrapped_func(f)
            for name, f in vars(math).items()
            if callable(f) and not name.startswith("_")
        }
        wrapped = {n: self._wrapped.get(id(f), f) for n, f in vars(math).items()}
        self._wrapped[id(math)] = SimpleNamespace(**wrapped)
        self._registered = set(_symbolic_trace._wrapped_fns_to_patch)

    def methods(self, kind: type) -> dict[str, FunctionType]:
        """Return the methods of a module class and its bases up to `nn.Module`."""
        found: dict[str, FunctionType] = {}
        for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
            own = vars(base).items()
            found |= {n: f for n, f in own if isinstance(f, FunctionType) and n[:2] != "__"}
        return {name: self.function(method) for name, method in found.items()}

    def function(self, original: Any) -> Any:
        """Return a function that runs in the copy of its namespace."""
        if not isinstance(original, FunctionType) or _is_library(original.__globals__):
            return original
        made = FunctionType(
            original.__code__,
            self._copy(original.__globals__),
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        made.__kwdefaults__ = original.__kwdefaults__
        made.__dict__.update(original.__dict__)
        return made

    def _copy(self, namespace: dict[str, Any]) -> dict[str, Any]:
        found = self._copies.get(id(namespace))
        if found is None:
            found = self._copies[id(namespace)] = dict(namespace)  # before it is needed below
            package = _package(namespace)
            for name, value in namespace.items():
                if (id(namespace), name) in self._registered:
                    found[name] = _symbolic_trace._create_wrapped_func(value)
                elif id(value) in self._wrapped:
                    found[name] = self._wrapped[id(value)]
                elif isinstance(value, FunctionType) and _package(value.__globals__) == package:
                    found[name] = self.function(value)
        return found


def _package(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__")).partition(".")[0]


def _is_library(namespace: Mapping[str, Any]) -> bool:
    """Return whether code needs no copy of its namespace: torch's own is traced as it is."""
    return _package(namespace) == "torch"


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
) -> tuple[dict[fx.Node, torch.Size], Any]:
    recorder = _ShapeRecorder(fx.GraphModule(model, graph))
    given = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
    output = recorder.run(initial_env=values, enable_io_processing=False)
    return given | recorder.shapes, output


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's first parameter that has data; else the CPU."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _without(attributes: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in names}


def _same_items(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is value for key, value in b.items())
