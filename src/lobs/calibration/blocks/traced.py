"""Steps of a traced network: they run one at a time for all batches in both networks.

Only values that a later step needs are kept. That costs two forward passes in all, and memory for
the activations between two layers. What does not fit goes to temporary files.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.batches import user_code
from lobs.calibration.blocks.base import (
    Block,
    LayerPair,
    Run,
    allowed_in_memory,
    loaded,
    size,
    spilled,
    version,
)
from lobs.calibration.forward import Masks, masks_of, padded
from lobs.layers.graph import TraceError, argument_names, arguments, device_of, trace
from lobs.layers.untouched import same_noise, seed_of


class _Steps:
    """Run a traced network pair step by step; free each value after its last use."""

    def __init__(
        self, dense: nn.Module, pruned: nn.Module, graph: fx.Graph, batches: Iterable[Any]
    ) -> None:
        self.graph, self.nodes = graph, list(graph.nodes)
        self.sides = [fx.Interpreter(fx.GraphModule(m, graph)) for m in (dense, pruned)]
        self.device = device_of(dense)
        self.last_use = {
            source: i for i, node in enumerate(self.nodes) for source in node.all_input_nodes
        }
        self.allowed = allowed_in_memory()
        self.held, self.shelf = 0, memory.Shelf()
        self.masks: list[Masks] = []  # of padding, by batch
        self.values = [self._start(batch) for batch in batches]
        self.done = 0

    def _start(self, batch: Any) -> list[dict[fx.Node, Any]]:
        # One copy per side: a first step that works in place must not change the other side.
        sides = [arguments(self.graph, batch, self.device) for _ in self.sides]
        self.masks.append(masks_of(batch))
        if self.held + sum(map(_held, sides)) > self.allowed:
            sides = [{n: spilled(v, self.shelf) for n, v in values.items()} for values in sides]
        self.held += sum(map(_held, sides))
        return sides

    def value(self, side: int, values: dict[fx.Node, Any], node: fx.Node) -> Any:
        """Run one step on one side of one batch."""
        given = {n: loaded(values[n]) for n in node.all_input_nodes}
        before = {
            n: version(v) for n, v in given.items() if isinstance(v, Tensor) and v is not values[n]
        }
        self.sides[side].env = given
        with user_code(f"running step '{node.name}' of the network"):
            out = self.sides[side].run_node(node)
        # A step may write into its input, and later steps must see that.
        changed = {n: given[n] for n, old in before.items() if version(given[n]) != old}
        values.update({n: spilled(v, memory.Shelf()) for n, v in changed.items()})
        return out

    def advance(self, stop: int) -> None:
        """Run all steps before number `stop`, for all batches on both sides."""
        ahead = range(self.done, stop)
        steps = [
            (i, self.nodes[i]) for i in ahead if self.nodes[i].op not in ("placeholder", "output")
        ]
        fresh, shelf = {n for _, n in steps}, memory.Shelf()
        for number, batch in enumerate(self.values):
            for side, values in enumerate(batch):
                before = _held(values)
                with same_noise(seed_of(number, stop), self.device):
                    for i, node in steps:
                        values[node] = self.value(side, values, node)
                        for source in node.all_input_nodes:
                            if self.last_use[source] <= i:
                                values.pop(source, None)
                if self.held + _held(values) - before > self.allowed:
                    values.update({n: spilled(values[n], shelf) for n in fresh & values.keys()})
                self.held += _held(values) - before
        self.done = max(self.done, stop)


class Step(Block):
    """Run one traced step that holds layers."""

    def __init__(
        self, steps: _Steps, number: int, layers: Sequence[LayerPair], hold_out: bool
    ) -> None:
        super().__init__(layers, "")
        self.steps, self.number = steps, number
        self.holds_out, self.count = hold_out, len(steps.values)

    def both(self) -> Iterator[tuple[Run, Run]]:
        """See `Block`."""
        self.steps.advance(self.number)
        node = self.steps.nodes[self.number]
        for masks, (dense, pruned) in zip(self.steps.masks, self.steps.values, strict=True):
            yield (
                partial(self._run, masks, 0, dense, node),
                partial(self._run, masks, 1, pruned, node),
            )

    def _run(self, masks: Masks, side: int, values: dict[fx.Node, Any], node: fx.Node) -> Any:
        with padded(masks):
            return self.steps.value(side, values, node)


_FIRST_ONLY: tuple[frozenset[str] | None, ...] = (None,)


def given_names(model: nn.Module, batches: Iterable[Any]) -> tuple[frozenset[str] | None, ...]:
    """Return the different sets of arguments that the batches of all processes give.

    A network with one parameter leaves no choice, so its batches are not read here.
    """
    if len(inspect.signature(model.forward).parameters) <= 1:
        return _FIRST_ONLY
    with process_group().raise_together():
        own = {argument_names(batch) for batch in batches}
    listed = [None if names is None else sorted(names) for names in own]
    found = [names for some in process_group().all_gather(listed) for names in some]
    return tuple({None if names is None else frozenset(names) for names in found})


def traced_steps(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    names: tuple[frozenset[str] | None, ...],
    *,
    hold_out: bool = False,
) -> list[Block] | None:
    """Return the traced steps that hold layers.

    None where the network cannot be traced, where a layer runs more than once, or where batches
    differ in the arguments that they give.

    Args:
        dense: the network before pruning.
        pruned: the copy whose layers the caller writes.
        batches: an iterable that can be read more than once.
        layers: pairs of one layer in the dense and the pruned network.
        names: the sets of arguments that batches give.
        hold_out: keep one sample in eight out of the layers' moments.
    """
    if len(names) != 1 or any(before.tied or before.owner is dense for before, _ in layers):
        return None
    own = frozenset(id(before.owner) for before, _ in layers)
    try:
        traced = trace(dense, names=names[0], leaves=own)
    except TraceError:
        return None
    if traced.assigns_state:  # the pruned copy lacks the attributes that tracing added
        return None
    holding: dict[int, list[LayerPair]] = {}
    for number, node in enumerate(traced.graph.nodes):
        if node.op == "call_module":
            inside = set(map(id, dense.get_submodule(str(node.target)).modules()))
            found = [pair for pair in layers if id(pair[0].owner) in inside]
            if found:
                holding[number] = found
    running = [before.name for found in holding.values() for before, _ in found]
    if sorted(running) != sorted(before.name for before, _ in layers):
        return None
    steps = _Steps(dense, pruned, traced.graph, batches)
    return [Step(steps, number, found, hold_out) for number, found in holding.items()]


def _held(values: Mapping[fx.Node, Any]) -> int:
    """Return the bytes of those values that are in memory."""
    return sum(map(size, values.values()))
