"""Repeated blocks: children of a `ModuleList` or `Sequential`, each fed by the one before it.

Decoders, encoders and residual networks are built that way. The network runs only up to the first
block, whose arguments (masks, positions, rotary embeddings) are captured. From there on each block
runs by itself on the activations that the block before it gave. The cost is linear in depth,
whether the network can be traced or not.

A row of blocks ends where something else happens between two blocks, such as a skip connection
over them. The next row then starts with a run of the network. Layers outside all blocks are
reached by running the network, too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.batches import user_code
from lobs.calibration.blocks.base import (
    Block,
    Inputs,
    LayerPair,
    Run,
    StopRun,
    allowed_in_memory,
    inputs_of,
    loaded,
    size,
    spilled,
    version,
)
from lobs.calibration.blocks.rerun import Rerun
from lobs.calibration.forward import call, length
from lobs.layers import Layer, watching
from lobs.layers.discovery import is_plain_layer
from lobs.layers.hooks import Removable, after_forward, before_forward

# A block that runs again must not add to a cache of keys and values.
_CACHES = {
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "use_cache": False,
}
KEPT_BACK = 8
_HIDDEN = object()  # stands in captured arguments where the activations stood


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a block, without the activations that flow through it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Arguments]:
        """Split a call's arguments into the activations, which come first, and all others."""
        if args:
            first, rest = args[0], cls((_HIDDEN, *args[1:]), dict(kwargs))
        else:
            key = next(iter(kwargs), "")
            first, rest = kwargs.get(key), cls((), {**kwargs, key: _HIDDEN})
        kwargs = {key: _CACHES.get(key, value) for key, value in rest.kwargs.items()}
        plain = tuple(None if _is_cache(value) else value for value in rest.args)
        return (first if isinstance(first, Tensor) else None), cls(plain, kwargs)

    def run(self, module: nn.Module, x: Tensor) -> Any:
        """Run a module on activations with these arguments."""
        args = [x if value is _HIDDEN else value for value in self.args]
        return module(*args, **{k: x if v is _HIDDEN else v for k, v in self.kwargs.items()})

    def rows(self, rows: slice, count: int) -> Arguments:
        """Return the arguments of some samples of a batch of `count`."""
        cut = partial(rows_of, rows=rows, count=count)
        return Arguments(tuple(map(cut, self.args)), {k: cut(v) for k, v in self.kwargs.items()})

    def to(self, kind: torch.dtype) -> Arguments:
        """Return the arguments with floating-point tensors in another type."""
        args, kwargs = cast(self.args, kind), cast(dict(self.kwargs), kind)
        return Arguments(args, kwargs)

    def same(self, other: Arguments, equal: Any = None) -> bool:
        """Return whether all values are the same objects, or equal by a function for tensors."""
        own = (self.args, *self.kwargs.items())
        return _same(own, (other.args, *other.kwargs.items()), equal)


@dataclass(frozen=True)
class Row:
    """Blocks that feed each other; `uniform` if all get the first one's other arguments."""

    blocks: list[str]
    uniform: bool


@dataclass
class Sample:
    """A batch, or part of one, at a block: its input when pruned and the dense block's output.

    `held_out` says that no layer was solved on it.
    """

    inputs: Tensor | memory.Shelved
    arguments: Arguments
    wanted: Tensor | memory.Shelved
    held_out: bool

    @property
    def wanted_size(self) -> int:
        """Return how many numbers the dense block's output has."""
        return math.prod(self.wanted.shape)

    @property
    def form(self) -> Hashable:
        """Return the shapes of the input and of all other arguments."""
        return tuple(self.inputs.shape), shapes((self.arguments.args, dict(self.arguments.kwargs)))


class Repeated(Block):
    """One block of a row."""

    def __init__(self, row: Streams, name: str, layers: Sequence[LayerPair]) -> None:
        super().__init__(layers, name)
        self.row, self._dense_done = row, False
        self._seen: list[Inputs] = []  # of the dense block's layers, by batch
        self.holds_out = row.hold_out

    @property
    def module(self) -> nn.Module:
        """Return the block of the pruned network."""
        return self.row.module(1, self.name)

    def both(self) -> Iterator[tuple[Run, Run]]:
        """See `Block`."""
        self.row.start()
        for index in range(len(self.row.held_out)):
            yield (
                partial(self.row.run, 0, self.name, index),
                partial(self.row.run, 1, self.name, index),
            )

    def inputs(
        self, layers: Sequence[LayerPair], *, held_out: bool = False
    ) -> Iterator[tuple[Inputs, Inputs]]:
        """See `Block`. The dense block runs once for all its layers."""
        self._advance_dense()
        for index, held in enumerate(self.row.held_out):
            if held is held_out:
                seen = self._seen[index]
                dense = {a.name: [loaded(x) for x in seen[a.name]] for a, _ in layers}
                run = partial(self.row.run, 1, self.name, index)
                yield dense, inputs_of([b for _, b in layers], self.calls, run)

    def samples(self) -> list[Sample]:
        """Return every batch's input in the pruned network beside the dense block's output."""
        self._advance_dense()  # so that the dense side's values are the block's outputs
        arguments = self.row.arguments[1]
        return [
            Sample(x, arguments[index][self.name], wanted, self.row.held_out[index])
            for index, (wanted, x) in enumerate(zip(*self.row.values, strict=True))
        ]

    def advance(self) -> None:
        """See `Block`."""
        self._advance_dense()
        self.row.advance(1, self.name)
        distinct = {id(x): x for seen in self._seen for inputs in seen.values() for x in inputs}
        self.row.held -= sum(map(size, distinct.values()))
        self._seen.clear()

    def _advance_dense(self) -> None:
        """Run the dense block on all batches, once; keep its layers' inputs."""
        if self._dense_done:
            return
        self._dense_done = True
        self.row.start()
        shelf = memory.Shelf()
        found: Inputs = {}
        last: tuple[Any, ...] = (None, 0, None)  # layers with one input share what is kept of it

        def note(name: str, x: Tensor) -> None:
            nonlocal last
            if x is not last[0] or version(x) != last[1]:
                # A copy: the block may work in place.
                last = x, version(x), self.row.keep(x.detach().clone(), shelf)
            found.setdefault(name, []).append(last[2])

        with watching(layer.on_input(partial(note, layer.name)) for layer, _ in self.layers):
            for index in range(len(self.row.held_out)):
                self.row.step(0, self.name, index, shelf)
                self._seen.append(found)
                found, last = {}, (None, 0, None)


@dataclass
class Streams:
    """The activations of both networks at the present boundary of a row."""

    models: tuple[nn.Module, nn.Module]
    batches: Iterable[Any]
    row: Row
    hold_out: bool = False
    values: list[list[Any]] = field(default_factory=lambda: [[], []])
    arguments: list[list[dict[str, Arguments]]] = field(default_factory=lambda: [[], []])
    held_out: list[bool] = field(default_factory=list)
    started: bool = False

    def start(self) -> None:
        """Run both networks up to the row, once, and keep what its blocks are called with."""
        if self.started:
            return
        self.started = True
        self.allowed, self.held, shelf = allowed_in_memory(), 0, memory.Shelf()
        counts = process_group().all_gather(length(self.batches) or 0)
        total, first = sum(counts), sum(counts[: process_group().rank])
        for number, batch in enumerate(self.batches, start=first):
            parts: list[slice] = []
            for side, model in enumerate(self.models):
                x, others = captured(model, batch, self.row)
                parts = parts or self._parts(x, others[self.row.blocks[0]], total)
                for part in parts:
                    self.values[side].append(self.keep(x[part].clone(), shelf))
                    self.arguments[side].append(
                        {name: found.rows(part, len(x)) for name, found in others.items()}
                        if len(parts) > 1
                        else others
                    )
            # Of fewer than eight batches, one that cannot be cut is held out if it is the last.
            every = KEPT_BACK if total >= KEPT_BACK else max(2, total)
            last = self.hold_out and number % every == every - 1
            self.held_out += [False, True] if len(parts) > 1 else [last]

    def _parts(self, x: Tensor, others: Arguments, total: int) -> list[slice]:
        """Cut the last eighth off one of few batches, where blocks treat rows independently."""
        whole = [slice(0, len(x))]
        edge = len(x) - len(x) // KEPT_BACK
        if not self.hold_out or total >= KEPT_BACK or edge == len(x):
            return whole
        parts = [slice(0, edge), slice(edge, len(x))]
        block = self.module(0, self.row.blocks[0])
        try:
            outs = [
                flowing(others.rows(part, len(x)).run(block, x[part].clone()))
                for part in (*whole, *parts)
            ]
        except Exception:  # the user's block may refuse a part in any way
            return whole
        if any(out is None for out in outs) or outs[0].shape[:1] != x.shape[:1]:  # type: ignore[union-attr]
            return whole
        agree = all(
            torch.allclose(out, outs[0][part], 1e-2, 1e-4)  # type: ignore[index,arg-type]
            for out, part in zip(outs[1:], parts, strict=True)
        )
        return parts if agree else whole

    def module(self, side: int, name: str) -> nn.Module:
        """Return a block of one network."""
        return self.models[side].get_submodule(name)

    def run(self, side: int, name: str, index: int) -> Any:
        """Run one block of one network on one batch."""
        # A block may work in place, and its input is needed again.
        x = loaded(self.values[side][index])
        x = x.clone() if x is self.values[side][index] else x
        with user_code(f"running block '{name}'"):
            return self.arguments[side][index][name].run(self.module(side, name), x)

    def advance(self, side: int, name: str) -> None:
        """Replace a network's activations before a block by those after it."""
        shelf = memory.Shelf()
        for index in range(len(self.held_out)):
            self.step(side, name, index, shelf)

    def step(self, side: int, name: str, index: int, shelf: memory.Shelf) -> None:
        """Replace one batch's activations before a block by those after it."""
        out = flowing(self.run(side, name, index))
        assert out is not None  # the first look at the row has checked it
        self.held -= size(self.values[side][index])
        self.values[side][index] = self.keep(out.detach(), shelf)

    def keep(self, x: Tensor, shelf: memory.Shelf) -> Any:
        """Return a tensor as it is, or, where memory is short, its place in a file."""
        kept = spilled(x, shelf) if self.held + size(x) > self.allowed else x
        self.held += size(kept)
        return kept


def repeated_blocks(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[LayerPair],
    *,
    hold_out: bool = False,
) -> list[Block] | None:
    """Return the network as rows of repeated blocks and of layers between them.

    None where it has no such rows, or so many that running up to each would cost too much.

    Args:
        dense: the network before pruning.
        pruned: the copy whose layers the caller writes.
        batches: an iterable that can be read more than once.
        layers: pairs of one layer in the dense and the pruned network.
        hold_out: keep one sample in eight out of the layers' moments.
    """
    plan: list[Any] | None = None
    with process_group().raise_together():
        batch = next(iter(batches), None)
        if batch is not None:
            own = [before for before, _ in layers]
            inner, outer = candidates(dense), candidates(dense, outermost=True)
            plan = _look(dense, batch, own, inner)
            if not plan and outer != inner:
                plan = _look(dense, batch, own, outer)
    # A process without data follows the others.
    plans = [found for found in process_group().all_gather(plan) if found is not None]
    if not plans or any(found != plans[0] for found in plans) or not plans[0]:
        return None
    pairs = {before.name: (before, after) for before, after in layers}
    made: list[Block] = []
    for blocks, uniform, names in plans[0]:
        if not blocks:
            made.append(Rerun(dense, pruned, batches, [pairs[name] for name in names]))
            continue
        streams = Streams((dense, pruned), batches, Row(blocks, uniform), hold_out)
        made += [
            Repeated(streams, block, [pairs[n] for n in pairs if n.startswith(f"{block}.")])
            for block in blocks
        ]
    return made


def flowing(out: Any) -> Tensor | None:
    """Return the activations that a block's output passes on: a tensor, or the first of several."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


def candidates(model: nn.Module, *, outermost: bool = False) -> list[str]:
    """Return the innermost children of module lists that hold two layers or more.

    Args:
        model: the network.
        outermost: return the outermost ones instead.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            prefix = f"{name}." if name else ""
            inside = [prefix + child for child, part in module.named_children() if has_layers(part)]
            found += inside if len(inside) > 1 else []
    if outermost:
        return [a for a in found if not any(a.startswith(f"{b}.") for b in found)]
    return [a for a in found if not any(b.startswith(f"{a}.") for b in found)]


def has_layers(module: nn.Module) -> bool:
    """Return whether a module holds two layers or more."""
    return sum(map(is_plain_layer, module.modules())) > 1


@dataclass(frozen=True)
class _Call:
    name: str
    x: Tensor | None = None
    others: Arguments | None = None  # None: a layer outside all blocks


def _look(model: nn.Module, batch: Any, layers: Sequence[Layer], names: Sequence[str]) -> list[Any]:
    """Run a network once; return its rows as (blocks, uniform, layers outside), or nothing.

    Args:
        model: the network.
        batch: what to run it on.
        layers: its layers.
        names: modules that may be blocks.
    """
    inside = {n: any(n.startswith(f"{block}.") for block in names) for n in _all_names(layers)}
    if not names or any(len({inside[n] for n in layer.names}) > 1 for layer in layers):
        return []
    if any(layer.tied and inside[layer.name] for layer in layers):
        return []
    outside = [layer for layer in layers if not inside[layer.name]]
    calls, outs = _watched(model, batch, names, outside)
    run = [c.name for c in calls if c.others is not None]
    if sorted(run) != sorted(names):  # a block that runs twice, or not at all
        return []
    plan: list[tuple[list[str], bool, list[str]]] = []
    first: Arguments | None = None
    before: _Call | None = None
    for now in calls:
        if now.others is None:
            if before is not None and before.others is None:
                plan[-1][2].append(now.name)
            else:
                plan.append(([], True, [now.name]))
        elif now.x is None or outs[now.name] is None:
            return []
        elif before is not None and outs.get(before.name) is now.x and first is not None:
            blocks, uniform, _ = plan[-1]
            plan[-1] = ([*blocks, now.name], uniform and first.same(now.others), [])
        else:
            plan.append(([now.name], True, []))
            first = now.others
        before = now
    rows = [blocks for blocks, _, _ in plan if blocks]
    if 2 * len(rows) > len(names):
        return []
    if not all(_repeats(model, blocks, calls, outs) for blocks in rows):
        return []
    if not all(uniform for _, uniform, _ in plan) and not _steady(model, batch, names, calls):
        return []
    return [list(item) for item in plan]


def _repeats(
    model: nn.Module,
    blocks: Sequence[str],
    calls: Sequence[_Call],
    outs: Mapping[str, Tensor | None],
) -> bool:
    """Return whether a row of blocks, run one by one, gives what it gave in the network."""
    called = {c.name: c for c in calls}
    x = called[blocks[0]].x
    for name in blocks:
        others = called[name].others
        if x is None or others is None:
            return False
        x = flowing(others.run(model.get_submodule(name), x.clone()))
    wanted = outs[blocks[-1]]
    return x is not None and wanted is not None and torch.allclose(x, wanted, 1e-2, 1e-4)


def _all_names(layers: Sequence[Layer]) -> list[str]:
    return [name for layer in layers for name in layer.names]


def _watched(
    model: nn.Module,
    batch: Any,
    names: Sequence[str],
    outside: Sequence[Layer],
    change: float = 1.0,
) -> tuple[list[_Call], dict[str, Tensor | None]]:
    """Return the calls of blocks and of layers outside them, in order, and the blocks' outputs.

    Every output is multiplied by `change`.
    """
    calls: list[_Call] = []
    outs: dict[str, Tensor | None] = {}

    def enter(name: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        calls.append(_Call(name, *Arguments.of(args, kwargs)))

    def leave(name: str, _module: nn.Module, _args: Any, out: Any) -> Any:
        outs[name] = x = flowing(out)
        if change == 1.0 or x is None:
            return None
        moved = x * change
        return moved if isinstance(out, Tensor) else type(out)((moved, *out[1:]))

    def note(name: str, _x: Tensor) -> None:
        if not any(c.name == name for c in calls):
            calls.append(_Call(name))

    def hooks() -> Iterator[Removable]:
        for name in names:
            module = model.get_submodule(name)
            yield before_forward(module, partial(enter, name), with_kwargs=True)
            yield after_forward(module, partial(leave, name))
        for layer in outside:
            yield layer.on_input(partial(note, layer.name))

    with watching(hooks()):
        call(model, batch)
    return calls, outs


def _steady(model: nn.Module, batch: Any, names: Sequence[str], calls: Sequence[_Call]) -> bool:
    """Return whether the blocks' other arguments stay when the activations change."""
    moved, _ = _watched(model, batch, names, [], change=1.01)
    found = {c.name: c.others for c in moved}
    return all(
        c.others is None or (c.name in found and c.others.same(found[c.name], torch.equal))  # type: ignore[arg-type]
        for c in calls
    )


def captured(model: nn.Module, batch: Any, row: Row) -> tuple[Tensor, dict[str, Arguments]]:
    """Run a network up to a row of blocks; return its input and the blocks' other arguments."""
    start: list[Tensor] = []
    found: dict[str, Arguments] = {}
    wanted = row.blocks[:1] if row.uniform else row.blocks

    def enter(name: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        x, found[name] = Arguments.of(args, kwargs)
        if name == row.blocks[0] and x is not None:
            start.append(x.detach().clone())
        if name == wanted[-1]:
            raise StopRun

    with (
        watching(
            before_forward(model.get_submodule(n), partial(enter, n), with_kwargs=True)
            for n in wanted
        ),
        suppress(StopRun),
    ):
        call(model, batch)
    return start[0], {name: found.get(name, found[row.blocks[0]]) for name in row.blocks}


def _is_cache(value: Any) -> bool:
    """Return whether a positional argument is a cache as transformers makes them."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def rows_of(value: Any, rows: slice, count: int) -> Any:
    """Cut tensors whose first dimension is the batch, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == count > 1 else value
    if type(value) in (tuple, list):
        return type(value)(rows_of(part, rows, count) for part in value)
    if type(value) is dict:
        return {key: rows_of(part, rows, count) for key, part in value.items()}
    return value


def shapes(value: Any) -> Hashable:
    """Return the shapes of all tensors in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(shapes, value))
    if isinstance(value, Mapping):
        return tuple((str(key), shapes(part)) for key, part in value.items())
    return None


def cast(value: Any, kind: torch.dtype) -> Any:
    """Cast floating-point tensors, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.to(kind) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast(part, kind) for part in value)
    if type(value) is dict:
        return {key: cast(part, kind) for key, part in value.items()}
    return value


def _same(a: Any, b: Any, equal: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and equal is not None and a.shape == b.shape and bool(equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, equal) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and isinstance(a, str | int | float | bool) and a == b
