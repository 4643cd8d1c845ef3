"""Learn how a network uses its weights, by watching one forward pass.

A module's class does not always tell: subclasses compute in their own way, and weights are used
through functions. What is learnt holds for the network and its copies; it is kept beside them, not
in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from lobs.layers.functional import Place, Product, Use, _memory, placed, plain_experts, products
from lobs.layers.hooks import Removable, after_forward, before_forward, watching


@dataclass(frozen=True)
class Learnt:
    """How a network uses its weights.

    Args:
        uses: weights that are multiplied with inputs, in any module.
        others: what else reads a parameter, by its name.
    """

    uses: tuple[Use, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)


_learnt: WeakKeyDictionary[nn.Module, Learnt] = WeakKeyDictionary()


def learnt(model: nn.Module) -> Learnt | None:
    """Return what is known about a network; None where it has not been watched."""
    try:
        return _learnt.get(model)
    except TypeError:  # a network that is compared by its values has no key
        return None


def teach(model: nn.Module, known: Learnt) -> None:
    """Let a network have what another process has learnt about it."""
    _learnt[model] = known


def carry_over(model: nn.Module, twin: nn.Module) -> None:
    """Let a copy of a network know what is known about the network."""
    if model in _learnt:
        _learnt[twin] = _learnt[model]


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Watch the network while the block runs it, and keep what is learnt."""
    recorder = _Recorder(model)
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(plain_experts(module))
        stack.enter_context(watching(recorder.hooks(model)))
        stack.enter_context(recorder)
        yield
    _learnt[model] = recorder.learnt()


class _Recorder(TorchFunctionMode):
    """Record every product with a parameter, and everything else that reads one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.memory: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            if not (isinstance(parameter, UninitializedParameter) or parameter.is_meta):
                self.memory.setdefault(_memory(parameter), []).append((name, parameter))
        self.inside: list[str] = [""]
        self.uses: dict[Use, None] = {}
        self.others: dict[str, str] = {}

    def hooks(self, model: nn.Module) -> Iterator[Removable]:
        """Yield hooks that tell which module's forward pass runs."""

        def enter(path: str, *_: Any) -> None:
            self.inside.append(path)

        def leave(*_: Any) -> None:
            self.inside.pop()

        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                yield before_forward(module, partial(enter, path))
                yield after_forward(module, leave)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found, told = self._multiplied(products(func, args, kwargs)), set[int]()
        for use, tensors in found:
            self.uses[use] = None
            told |= tensors
        out = func(*args, **kwargs)
        self._note_others(func, (args, kwargs), out, told)
        return out

    def _multiplied(self, called: Sequence[Product]) -> list[tuple[Use, set[int]]]:
        for product in called:
            for name, whole in self.memory.get(_memory(product.weight), ()):
                if whole.dim() > 1 and (at := placed(product.weight, whole)) is not None:
                    place, bias = Place(name, *at[:2]), self._place(product.bias)
                    use = product.use(place, at[2], self.inside[-1], bias, whole.dim())
                    ours = {id(product.weight)} | ({id(product.bias)} if bias else set())
                    # A transposed view is made anew, so its base counts by its memory.
                    return [(use, ours | {-_memory(product.weight)})]
        return []

    def _place(self, tensor: Tensor | None) -> Place | None:
        """Return where a bias lies; None where it is no parameter."""
        if tensor is None or tensor.dim() != 1:
            return None
        for name, whole in self.memory.get(_memory(tensor), ()):
            if whole.dim() == 1 and (at := placed(tensor, whole)) is not None:
                return Place(name, *at[:2])
        return None

    def _note_others(self, func: Any, given: Any, out: Any, told: set[int]) -> None:
        """Note parameters that a function computes with, other than as the weight of a product."""
        results = [x for x in _pytree.tree_leaves(out) if isinstance(x, Tensor)]
        made = {_memory(x) for x in results}
        for x in _pytree.tree_leaves(given):
            if not isinstance(x, Tensor) or id(x) in told or -_memory(x) in told:
                continue
            for name, whole in self.memory.get(_memory(x), ()):
                if whole.dim() > 1 and results and _memory(x) not in made:
                    self.others.setdefault(name, getattr(func, "__name__", "a function"))

    def learnt(self) -> Learnt:
        """Return what was seen; a weight that is used in two ways is no layer."""
        ways: dict[str, set[Any]] = {}
        for use in self.uses:
            way = (use.site, use.flipped, use.settings, use.routed)
            ways.setdefault(use.weight.key, set()).add(way)
        others = dict(self.others)
        for name, seen in ways.items():
            if len(seen) > 1:
                others.setdefault(name, "several modules")
        return Learnt(tuple(_complete(self.uses, self.memory)), others)


def _complete(
    uses: Mapping[Use, None], memory: Mapping[int, Sequence[tuple[str, Tensor]]]
) -> Iterator[Use]:
    """Yield the uses; where one of a parameter's matrices was used, those of all of them."""
    sizes = {name: len(whole) for found in memory.values() for name, whole in found}
    done: set[str] = set()
    for use in uses:
        key = use.weight.key
        if not use.routed:
            yield use
        elif key not in done:
            done.add(key)
            for number in range(sizes[key]):
                yield replace(use, weight=Place(key, number, number + 1), bias=None)
