"""Two streams of activations, the dense network's and the pruned one's, side by side from layer to layer.

To prune a layer on what the pruned layers before it give, one must run the network up to that layer
again and again, or keep what was reached. Where `torch.fx` can trace the network, its steps are run
one at a time for all batches, in both networks, and only values that a later step still needs are
kept: two forward passes in all, and memory for the activations between two layers (past
`_IN_MEMORY` bytes, or a quarter of what a limit of memory leaves, they go to temporary files).
Where it cannot, or where a layer runs more than once, every layer costs a pass of both networks,
stopped as soon as the layer is reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lobs._system import memory
from lobs.calibration.batches import told
from lobs._system.distributed import process_group
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching
from lobs.layers.hooks import untouched
from lobs._system.progress import track
from lobs.calibration.forward import call, evaluating
from lobs.calibration.moments import PairedMoments

_IN_MEMORY = 4 * 2**30
_WORTH_A_FILE = 2**16


def walk(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[tuple[Layer, Layer]],
    known: Collection[str] = (),
) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Yield the pruned network's layers in the order they run, each with the moments of its inputs in both networks.

    `layers` are pairs of the same layer in the dense and the pruned network, in the order they run.
    The caller writes each layer before asking for the next, so later ones see what it gives. Of
    `known` layers the answer is there already: they come without moments.
    """
    with evaluating(dense), evaluating(pruned):
        with process_group().raise_together():
            parts = _traced(dense, pruned, batches, layers) or [
                _Rerun(dense, pruned, batches, layers)
            ]
        for part in parts:
            yield from _within(part, known)
            part.advance()


def _within(part: _Part, known: Collection[str]) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Go through the layers of one part, those that are given the same input at once."""
    groups = _sharing_inputs(part)
    if (
        memory.limit() is not None
    ):  # one run for each costs time, moments of several at once cost memory
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


def _sharing_inputs(part: _Part) -> list[list[tuple[Layer, Layer]]]:
    """Layers in groups that one run can serve: neighbours that are given the very same tensor."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(
            x
        )  # the tensors themselves: numbers of those that are gone would come again

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
    # A process without data has seen nothing; all must go through the layers in one order.
    groups, part.calls = next(
        (words for words in process_group().all_gather([groups, part.calls]) if words[0]), ([], {})
    )
    return [[pairs[name] for name in group] for group in groups]


def _identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Enough(BaseException):  # it is no error, and nobody's `except Exception` may keep it
    """Everything wanted of this run has been seen."""


def _inputs(
    layers: Sequence[Layer], calls: Mapping[str, int], run: Callable[[], Any]
) -> dict[str, list[Tensor]]:
    """What reaches each layer in one run, which is stopped once all have been called as often as they will be."""
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def note(name: str) -> Callable[[Tensor], None]:
        def callback(x: Tensor) -> None:
            found[name].append(x.detach())
            if all(len(found[n]) >= calls.get(n, 1) for n in found):
                raise _Enough

        return callback

    with watching(layer.on_input(note(layer.name)) for layer in layers), suppress(_Enough):
        run()
    return found


class _Part(ABC):
    """A stretch of the network that holds some of the layers, and how to run it in either network."""

    def __init__(self, layers: Sequence[tuple[Layer, Layer]]) -> None:
        self.layers = layers
        self.calls: dict[str, int] = {}  # how often each runs in one pass, where it is not once

    @abstractmethod
    def both(self) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        """For every batch, how to run this part in the dense and in the pruned network."""

    def advance(self) -> None:  # noqa: B027 - nothing to leave behind is a way to advance too
        """Leave this part behind, now that its layers are pruned."""

    def run_dense_once(self) -> None:
        """One batch through the dense network."""
        for dense, _ in self.both():
            dense()
            return
        if process_group().size == 1:
            raise CalibrationError("batches could be read only once: give a list or a DataLoader.")

    def runs(
        self, together: Sequence[tuple[Layer, Layer]], moments: Mapping[str, PairedMoments]
    ) -> Iterator[None]:
        """Add every batch's inputs of some layers to their moments."""
        for dense, pruned in self.both():
            wanted = _inputs([a for a, _ in together], self.calls, dense)
            given = _inputs([b for _, b in together], self.calls, pruned)
            for before, after in together:
                times, now = len(wanted[before.name]), len(given[after.name])
                if times != now:
                    raise CalibrationError(
                        f"layer '{before.name}' runs {times} times on a batch in the dense network "
                        f"and {now} times once layers "
                        "before it are pruned, so their inputs cannot be compared. Use "
                        "inputs='dense'."
                    )
                for x, x_hat in zip(wanted[before.name], given[after.name], strict=True):
                    moments[before.name].add(before, x, x_hat)
            yield


class _Rerun(_Part):
    """The whole network, run from its start for every layer."""

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        batches: Iterable[Any],
        layers: Sequence[tuple[Layer, Layer]],
    ) -> None:
        super().__init__(layers)
        self.models, self.batches = (dense, pruned), batches

    def both(self) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        """See `_Part`."""
        dense, pruned = self.models
        for batch in self.batches:
            yield partial(call, dense, batch), partial(call, pruned, batch)


class _Steps:
    """A traced network pair with the values that every batch has reached, freed after their last use."""

    def __init__(
        self, dense: nn.Module, pruned: nn.Module, graph: fx.Graph, batches: Iterable[Any]
    ) -> None:
        self.nodes = list(graph.nodes)
        self.sides = [fx.Interpreter(fx.GraphModule(m, graph)) for m in (dense, pruned)]
        self.device = next((p.device for p in dense.parameters()), torch.device("cpu"))
        self.last_use = {
            source: i for i, node in enumerate(self.nodes) for source in node.all_input_nodes
        }
        left = memory.room()
        self.allowed = _IN_MEMORY if left is None else min(_IN_MEMORY, left // 4)
        self.held, self.shelf = 0, memory.Shelf()
        self.values = [self._start(batch) for batch in batches]
        self.done = 0

    def _start(self, batch: Any) -> list[dict[fx.Node, Any]]:
        holders = [n for n in self.nodes if n.op == "placeholder"]
        if isinstance(batch, tuple | list):
            batch = batch[0]
        given = batch if isinstance(batch, Mapping) else {holders[0].target: batch}
        sides: list[dict[fx.Node, Any]] = []
        for _ in self.sides:
            # A copy for each side: a first step that works in place must not reach the other.
            values = {n: given.get(n.target, n.args[0] if n.args else None) for n in holders}
            sides.append(
                {
                    n: v.to(self.device, copy=True) if isinstance(v, Tensor) else v
                    for n, v in values.items()
                }
            )
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
        with told(f"running step '{node.name}' of the network"):
            out = self.sides[side].run_node(node)
        # What a step writes into its input, later steps must see there.
        changed = {n: given[n] for n, version in before.items() if given[n]._version != version}
        values.update({n: _spilled(v, memory.Shelf()) for n, v in changed.items()})
        return out

    def advance(self, stop: int) -> None:
        """Run all steps before number `stop` for all batches on both sides."""
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
    """One traced step that holds layers."""

    def __init__(self, steps: _Steps, number: int, layers: Sequence[tuple[Layer, Layer]]) -> None:
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


def _traced(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[tuple[Layer, Layer]],
) -> list[_Part] | None:
    """The network as traced steps that hold layers; None where it cannot be traced or a layer runs more than once."""
    if any(before.tied or before.root for before, _ in layers):
        return None
    graph = _graph(dense)
    if graph is None:
        return None
    holding: dict[int, list[tuple[Layer, Layer]]] = {}
    for number, node in enumerate(graph.nodes):
        if node.op == "call_module":
            inside = set(map(id, dense.get_submodule(str(node.target)).modules()))
            found = [pair for pair in layers if id(pair[0].module) in inside]
            if found:
                holding[number] = found
    names = [before.name for found in holding.values() for before, _ in found]
    if sorted(names) != sorted(before.name for before, _ in layers):
        return None
    steps = _Steps(dense, pruned, graph, batches)
    return [_Step(steps, number, found) for number, found in holding.items()]


def _graph(model: nn.Module) -> fx.Graph | None:
    """A network's steps; None where it cannot be traced, or not without leaving something on it, which its copy lacks."""
    graph = None
    with (
        untouched(model) as changed,
        suppress(Exception),
    ):  # whatever the user's forward makes of proxies
        graph = fx.symbolic_trace(model).graph
    return None if changed else graph


def _spilled(value: Any, shelf: memory.Shelf) -> Any:
    """A tensor in a file; what is small, or no tensor, stays."""
    worth = (
        isinstance(value, Tensor) and value.device.type == "cpu" and _bytes(value) >= _WORTH_A_FILE
    )
    return shelf.put(value) if worth else value


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, memory.Shelved) else value


def _held(values: Mapping[fx.Node, Any]) -> int:
    """Bytes of those values that are in memory."""
    return sum(map(_bytes, values.values()))


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
