"""Collect the inputs of every layer in the dense and in the pruned network, side by side.

A layer is pruned on the outputs of the pruned layers before it. So one must run the network up to
that layer again, or keep the activations reached so far.

Where the network can be traced, its steps run one at a time for all batches in both networks. Only
values that a later step needs are kept. That costs two forward passes in all, and memory for the
activations between two layers. Past `_IN_MEMORY` bytes, or a quarter of the memory that a limit
leaves, they go to temporary files.

Where the network cannot be traced, or a layer runs more than once, every layer costs one pass of
both networks. The pass stops as soon as the layer is reached.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.batches import user_code
from lobs.calibration.forward import call, evaluating
from lobs.calibration.moments import PairedMoments
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching
from lobs.layers.graph import TraceError, argument_names, arguments, device_of, trace

_IN_MEMORY = 4 * 2**30
_WORTH_A_FILE = 2**16

LayerPair = tuple[Layer, Layer]


def walk(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    known: Collection[str] = (),
) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Yield the pruned network's layers in running order, with their input moments.

    The caller writes each layer before it asks for the next, so later layers see its new outputs.

    Args:
        dense: the network before pruning.
        pruned: the copy whose layers the caller writes.
        batches: an iterable that can be read more than once.
        layers: pairs of one layer in the dense and the pruned network, in running order.
        known: names of layers whose solution exists already; they come without moments.
    """
    with evaluating(dense), evaluating(pruned):
        names = _argument_names(dense, batches)
        with process_group().raise_together():
            parts = _traced(dense, pruned, batches, layers, names) or [
                _Rerun(dense, pruned, batches, layers)
            ]
        for part in parts:
            yield from _within(part, known)
            part.advance()


def _within(part: _Part, known: Collection[str]) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Go through the layers of one part; layers with the same input share a run."""
    groups = _sharing_inputs(part)
    if memory.limit() is not None:
        # One run per layer costs time; the moments of several layers at once cost memory.
        groups = [[pair] for group in groups for pair in group]
    for together in groups:
        wanted = [pair for pair in together if pair[0].name not in known]
        moments = {before.name: PairedMoments(before) for before, _ in wanted}
        with (
            process_group().raise_together(),
            track(f"inputs of {together[0][0].name}", None) as advance,
        ):
            for _ in part.runs(wanted, moments) if wanted else ():
                advance(1)
        for moment in moments.values():
            moment.join()
        for before, after in together:
            yield after, moments.get(before.name)


def _sharing_inputs(part: _Part) -> list[list[LayerPair]]:
    """Group the layers that one run can serve: neighbours whose input is the same tensor object."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> None:
        # The tensors themselves are kept: the id of a freed tensor may be used again.
        seen.setdefault(name, []).append(x)

    with (
        process_group().raise_together(),
        watching(before.on_input(partial(note, before.name)) for before, _ in part.layers),
    ):
        part.run_dense_once()
    part.calls = {name: len(inputs) for name, inputs in seen.items()}
    pairs = {before.name: (before, after) for before, after in part.layers}
    groups: list[list[str]] = []
    for name in seen:
        same = groups and _identical(seen[groups[-1][-1]], seen[name])
        groups[-1].append(name) if same else groups.append([name])
    # A process without data has seen no layer, yet all processes must take them in one order.
    gathered = process_group().all_gather([groups, part.calls])
    groups, part.calls = next((found for found in gathered if found[0]), ([], {}))
    return [[pairs[name] for name in group] for group in groups]


def _identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _StopRun(BaseException):  # not an Exception: user code that catches those must not keep it
    """End a run early, because all wanted inputs have been seen."""


def _inputs(
    layers: Sequence[Layer], calls: Mapping[str, int], run: Callable[[], Any]
) -> dict[str, list[Tensor]]:
    """Return the inputs of each layer in one run; the run stops after the last expected call."""
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def note(name: str) -> Callable[[Tensor], None]:
        def callback(x: Tensor) -> None:
            found[name].append(x.detach())
            if all(len(found[n]) >= calls.get(n, 1) for n in found):
                raise _StopRun

        return callback

    with watching(layer.on_input(note(layer.name)) for layer in layers), suppress(_StopRun):
        run()
    return found


class _Part(ABC):
    """Run a stretch of the network, which holds one or more layers, in either network."""

    def __init__(self, layers: Sequence[LayerPair]) -> None:
        self.layers = layers
        self.calls: dict[str, int] = {}  # calls of each layer in one pass, where not one

    @abstractmethod
    def both(self) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        """Yield for every batch a function that runs the dense part and one for the pruned."""

    def advance(self) -> None:  # noqa: B027 - a part that keeps no state has nothing to do
        """Leave this part behind, now that its layers are pruned."""

    def run_dense_once(self) -> None:
        """Run one batch through the dense network."""
        for dense, _ in self.both():
            dense()
            return
        if process_group().size == 1:
            raise CalibrationError("batches could be read only once: give a list or a DataLoader.")

    def runs(
        self, together: Sequence[LayerPair], moments: Mapping[str, PairedMoments]
    ) -> Iterator[None]:
        """Add the inputs of these layers to their moments, batch by batch."""
        for dense, pruned in self.both():
            dense_inputs = _inputs([a for a, _ in together], self.calls, dense)
            pruned_inputs = _inputs([b for _, b in together], self.calls, pruned)
            for before, after in together:
                xs, xs_hat = dense_inputs[before.name], pruned_inputs[after.name]
                if len(xs) != len(xs_hat):
                    raise CalibrationError(
                        f"layer '{before.name}' runs {len(xs)} times on a batch in the dense "
                        f"network and {len(xs_hat)} times once layers before it are pruned, so "
                        "their inputs cannot be compared. Use inputs='dense'."
                    )
                for x, x_hat in zip(xs, xs_hat, strict=True):
                    moments[before.name].add(before, x, x_hat)
            yield


class _Rerun(_Part):
    """Run the whole network from its start for every layer."""

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        batches: Iterable[Any],
        layers: Sequence[LayerPair],
    ) -> None:
        super().__init__(layers)
        self.models, self.batches = (dense, pruned), batches

    def both(self) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        """See `_Part`."""
        dense, pruned = self.models
        for batch in self.batches:
            yield partial(call, dense, batch), partial(call, pruned, batch)


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
        left = memory.room()
        self.allowed = _IN_MEMORY if left is None else min(_IN_MEMORY, left // 4)
        self.held, self.shelf = 0, memory.Shelf()
        self.values = [self._start(batch) for batch in batches]
        self.done = 0

    def _start(self, batch: Any) -> list[dict[fx.Node, Any]]:
        # One copy per side: a first step that works in place must not change the other side.
        sides = [arguments(self.graph, batch, self.device) for _ in self.sides]
        if self.held + sum(map(_held, sides)) > self.allowed:
            sides = [{n: _spilled(v, self.shelf) for n, v in values.items()} for values in sides]
        self.held += sum(map(_held, sides))
        return sides

    def value(self, side: int, values: dict[fx.Node, Any], node: fx.Node) -> Any:
        """Run one step on one side of one batch."""
        given = {n: _loaded(values[n]) for n in node.all_input_nodes}
        before = {
            n: v._version for n, v in given.items() if isinstance(v, Tensor) and v is not values[n]
        }
        self.sides[side].env = given
        with user_code(f"running step '{node.name}' of the network"):
            out = self.sides[side].run_node(node)
        # A step may write into its input, and later steps must see that.
        changed = {n: given[n] for n, version in before.items() if given[n]._version != version}
        values.update({n: _spilled(v, memory.Shelf()) for n, v in changed.items()})
        return out

    def advance(self, stop: int) -> None:
        """Run all steps before number `stop`, for all batches on both sides."""
        ahead = range(self.done, stop)
        steps = [
            (i, self.nodes[i]) for i in ahead if self.nodes[i].op not in ("placeholder", "output")
        ]
        fresh, shelf = {n for _, n in steps}, memory.Shelf()
        for batch in self.values:
            for side, values in enumerate(batch):
                before = _held(values)
                for i, node in steps:
                    values[node] = self.value(side, values, node)
                    for source in node.all_input_nodes:
                        if self.last_use[source] <= i:
                            values.pop(source, None)
                if self.held + _held(values) - before > self.allowed:
                    values.update({n: _spilled(values[n], shelf) for n in fresh & values.keys()})
                self.held += _held(values) - before
        self.done = max(self.done, stop)


class _Step(_Part):
    """Run one traced step that holds layers."""

    def __init__(self, steps: _Steps, number: int, layers: Sequence[LayerPair]) -> None:
        super().__init__(layers)
        self.steps, self.number = steps, number

    def both(self) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        """See `_Part`."""
        self.steps.advance(self.number)
        node = self.steps.nodes[self.number]
        for dense, pruned in self.steps.values:
            yield (
                partial(self.steps.value, 0, dense, node),
                partial(self.steps.value, 1, pruned, node),
            )


_FIRST_ONLY: tuple[frozenset[str] | None, ...] = (None,)


def _argument_names(model: nn.Module, batches: Iterable[Any]) -> tuple[frozenset[str] | None, ...]:
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


def _traced(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    names: tuple[frozenset[str] | None, ...],
) -> list[_Part] | None:
    """Return the traced steps that hold layers.

    None where the network cannot be traced, where a layer runs more than once, or where batches
    differ in the arguments that they give.
    """
    if len(names) != 1 or any(before.tied or before.root for before, _ in layers):
        return None
    try:
        traced = trace(dense, names=names[0])
    except TraceError:
        return None
    if traced.assigns_state:  # the pruned copy lacks the attributes that tracing added
        return None
    holding: dict[int, list[LayerPair]] = {}
    for number, node in enumerate(traced.graph.nodes):
        if node.op == "call_module":
            inside = set(map(id, dense.get_submodule(str(node.target)).modules()))
            found = [pair for pair in layers if id(pair[0].module) in inside]
            if found:
                holding[number] = found
    running = [before.name for found in holding.values() for before, _ in found]
    if sorted(running) != sorted(before.name for before, _ in layers):
        return None
    steps = _Steps(dense, pruned, traced.graph, batches)
    return [_Step(steps, number, found) for number, found in holding.items()]


def _spilled(value: Any, shelf: memory.Shelf) -> Any:
    """Move a large CPU tensor to a file; return anything else as it is."""
    worth = (
        isinstance(value, Tensor) and value.device.type == "cpu" and _bytes(value) >= _WORTH_A_FILE
    )
    return shelf.put(value) if worth else value


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, memory.Shelved) else value


def _held(values: Mapping[fx.Node, Any]) -> int:
    """Return the bytes of those values that are in memory."""
    return sum(map(_bytes, values.values()))


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
