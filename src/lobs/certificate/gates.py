"""Limits on the magnitude of a network's values, and what sums and products do with deviations.

A product of two tensors has no Lipschitz constant unless both are bounded, as gates are:

    ‖a∘b − a'∘b'‖ ≤ max|b'| · ‖a − a'‖ + max|a| · ‖b − b'‖.

A tensor that is broadcast is repeated. Its deviation then grows by the root of the repetitions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lobs.layers.graph import Trace
from lobs.layers.operations import Kind, Step

DIFFERENCES = (operator.sub, torch.sub, "sub")
STACKS = (torch.cat, torch.concat, torch.stack)
VIEWS = (
    "permute", "transpose", "unsqueeze", "squeeze", "chunk", "split",
    torch.permute, torch.transpose, torch.unsqueeze, torch.squeeze, torch.chunk, torch.split,
)  # fmt: skip
PARTS = (operator.getitem,)
# Outputs of these are inputs, means of inputs, or zeros.
_WITHIN = (
    Kind.IDENTITY, Kind.FLATTEN, Kind.RESHAPE, Kind.MAX_POOL, Kind.AVERAGE_POOL, Kind.MEAN,
    Kind.REARRANGE, Kind.SPREAD, Kind.LARGEST,
)  # fmt: skip
# Functions of constants that give a constant.
_PURE = (
    "add", "sub", "mul", "truediv", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "sigmoid", "tanh",
    "softmax", "abs", "square", "reciprocal", "reshape", "view", "unsqueeze", "squeeze", "expand",
    "permute", "transpose", "to", "float", "getitem",
)  # fmt: skip
_WRITES = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


class Limits:
    """Follow a traced network and know, where possible, how large a step's values can be.

    Args:
        model: the network.
        traced: its steps.
    """

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self._model, self._shapes, self._given = model, traced.shapes, traced.constants
        self._limits: dict[fx.Node, float] = {}
        self._constants: dict[fx.Node, Any] = {}

    def see(self, node: fx.Node, step: Step | None) -> None:
        """Note the limit of a step's output. Steps that write forget all limits."""
        if _writes(node, step):
            self._limits.clear()
            self._constants.clear()
            return
        constant = self._constant(node)
        if isinstance(constant, Tensor) and constant.is_floating_point() and constant.numel():
            self._limits[node] = float(constant.detach().abs().max())
            return
        limit = self._limit(node, step)
        if limit is not None and math.isfinite(limit):
            self._limits[node] = limit

    def _constant(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            name = str(node.target)
            known = name in self._given
            self._constants[node] = self._given[name] if known else attrgetter(name)(self._model)
        elif node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else node.target.__name__
            sources = node.all_input_nodes
            if name in _PURE and sources and all(n in self._constants for n in sources):
                self._constants[node] = self._computed(node)
        return self._constants.get(node)

    def _computed(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._constants.__getitem__)
        target: Any = node.target
        with torch.no_grad():
            if isinstance(target, str):
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def _limit(self, node: fx.Node, step: Step | None) -> float | None:
        operands = [self._of(arg) for arg in node.args]
        if node.target in STACKS and isinstance(node.args[0], list | tuple):
            parts = [self._of(part) for part in node.args[0]]
            return (
                max((p for p in parts if p is not None), default=None)
                if _all_known(parts)
                else None
            )
        if node.target in VIEWS or node.target in PARTS:
            return operands[0]
        if node.target in DIFFERENCES or (step is not None and step.kind is Kind.SUM):
            pair = operands[:2]
            plain = len(node.args) == 2 and not node.kwargs and _all_known(pair)
            return sum(p for p in pair if p is not None) if plain else None
        if step is None:
            return None
        if step.operation.largest is not None:
            return step.operation.largest
        own = operands[0] if operands else None
        if step.kind is Kind.SCALE and len(operands) == 2 and _all_known(operands):
            return math.prod(p for p in operands if p is not None)
        if own is None:
            return None
        if step.kind in _WITHIN or (step.kind is Kind.DROPOUT and step.is_identity):
            scaled = step.settings.get("divisor_override") is not None
            return own if even(step) and not scaled else None
        if step.kind is Kind.ELEMENTWISE and step.gain is not None and step.fixed:
            at_zero = float(step.apply(torch.zeros(1)).abs())
            return at_zero + step.gain * own
        return None

    def _of(self, value: Any) -> float | None:
        if isinstance(value, fx.Node):
            return self._limits.get(value)
        return abs(float(value)) if isinstance(value, int | float) else None

    def weights(
        self, node: fx.Node, step: Step | None, moved: Collection[fx.Node]
    ) -> list[tuple[fx.Node, float]] | None:
        """Return the inputs of a sum or product whose values move, each with its factor.

        None for other steps, and for products that are not bounded.

        Args:
            node: the step.
            step: its operation; None for one that is not in the table.
            moved: the steps whose outputs may differ between the two networks.
        """
        pair = [*node.args, *(v for k, v in node.kwargs.items() if k == "other")][:2]
        if len(pair) != 2 or (step is not None and not self._plain(step)):
            return None
        if (step is not None and step.kind is Kind.SUM) or (
            node.target in DIFFERENCES and "alpha" not in node.kwargs
        ):
            return [
                (n, self._spread(n, node)) for n in pair if isinstance(n, fx.Node) and n in moved
            ]
        if step is None or step.kind is not Kind.SCALE:
            return None
        found: list[tuple[fx.Node, float]] = []
        for one, other in (pair, pair[::-1]):
            if isinstance(one, fx.Node) and one in moved:
                limit = self._of(other)
                if limit is None:
                    return None
                found.append((one, limit * self._spread(one, node)))
        return found

    @staticmethod
    def _plain(step: Step) -> bool:
        alpha = step.settings.get("alpha", 1)
        return bool(isinstance(alpha, int | float) and alpha == 1)

    def _spread(self, source: fx.Node, node: fx.Node) -> float:
        own, whole = self._shapes[source].numel(), self._shapes[node].numel()
        return math.sqrt(whole / max(1, own))


def _all_known(limits: list[float | None]) -> bool:
    """Return whether there are limits, and none is missing."""
    return bool(limits) and all(limit is not None for limit in limits)


def even(step: Step) -> bool:
    """Return whether no output of an upsampling has a negative share of an input."""
    return step.settings.get("mode") != "bicubic"


def _writes(node: fx.Node, step: Step | None) -> bool:
    """Return whether a step may write into memory that earlier steps share."""
    called = node.op in ("call_method", "call_function")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    method = called and name.endswith("_") and not name.startswith("__")
    flags: Mapping[str, Any] = node.kwargs
    return bool(
        method
        or node.target in _WRITES
        or (step is not None and step.in_place)
        or flags.get("inplace")
        or flags.get("out") is not None
    )
