"""Repeated blocks: children of a `ModuleList` or `Sequential`, each fed by the one before it.

Decoders, encoders and residual networks are built that way. The network runs only up to the first
block, whose arguments (masks, positions, rotary embeddings) are captured. From there on each block
runs by itself on the activations that the block before it gave. The cost is linear in depth,
whether the network can be traced or not.

A second row of blocks starts with another run of the network. Layers outside all blocks are
reached by running the network, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.batches import user_code
from lobs.calibration.blocks.arguments import Arguments, flowing, shapes
from lobs.calibration.blocks.base import (
    IN_MEMORY,
    KEPT_BACK,
    Block,
    Inputs,
    LayerPair,
    Run,
    allowed_in_memory,
    held_out_whole,
    inputs_of,
    loaded,
    size,
    spilled,
    version,
)
from lobs.calibration.blocks.rerun import Rerun
from lobs.calibration.blocks.rows import Row, candidates, captured, look
from lobs.calibration.forward import Masks, length, masks_of, padded, rows_of_masks, unpadded
from lobs.layers import Layer, watching
from lobs.layers.untouched import seed_of


@dataclass
class Sample:
    """A batch, or part of one, at a block: its input when pruned and the dense block's output.

    `held_out` says that no layer was solved on it. `masks` are True where a position is no padding.
    """

    inputs: Tensor | memory.Shelved
    arguments: Arguments
    wanted: Tensor | memory.Shelved
    held_out: bool
    masks: Masks = ()
    seed: int = 0  # of the random numbers that the dense block drew

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
            Sample(
                x,
                arguments[index][self.name],
                wanted,
                self.row.held_out[index],
                self.row.masks[index],
                seed_of(self.name, index),
            )
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

        def note(layer: Layer, x: Tensor) -> None:
            nonlocal last
            if x is not last[0] or version(x) != last[1]:
                # A copy: the block may work in place.
                real = unpadded(layer, x.detach())
                copied = real.clone() if real.shape == x.shape else real
                last = x, version(x), self.row.keep(copied, shelf)
            found.setdefault(layer.name, []).append(last[2])

        with watching(layer.on_input(partial(note, layer)) for layer, _ in self.layers):
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
    most: int = IN_MEMORY  # bytes of activations that stay in memory
    values: list[list[Any]] = field(default_factory=lambda: [[], []])
    arguments: list[list[dict[str, Arguments]]] = field(default_factory=lambda: [[], []])
    held_out: list[bool] = field(default_factory=list)
    masks: list[Masks] = field(default_factory=list)  # of padding
    started: bool = False

    def start(self) -> None:
        """Run both networks up to the row, once, and keep what its blocks are called with."""
        if self.started:
            return
        self.started = True
        self.allowed = min(self.most, allowed_in_memory())
        self.held, shelf = 0, memory.Shelf()
        counts = process_group().all_gather(length(self.batches) or 0)
        total, first = sum(counts), sum(counts[: process_group().rank])
        layout: torch.memory_format | None = None
        for number, batch in enumerate(self.batches, start=first):
            parts: list[slice] = []
            for side, model in enumerate(self.models):
                if not side or model is not self.models[0]:  # one network need not run twice
                    x, others = captured(model, batch, self.row)
                if layout is None:
                    layout = self._layout(x, others)
                parts = parts or self._parts(x, others[self.row.blocks[0]], total)
                for part in parts:
                    form = layout if x.dim() == 4 else torch.preserve_format
                    own = x[part].clone(memory_format=form)
                    self.values[side].append(self.keep(own, shelf))
                    self.arguments[side].append(
                        {name: found.rows(part, len(x)) for name, found in others.items()}
                        if len(parts) > 1
                        else others
                    )
            self.masks += [rows_of_masks(masks_of(batch), part) for part in parts]
            alone = self.hold_out and held_out_whole(number, total)
            self.held_out += [False, True] if len(parts) > 1 else [alone]

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

    def _layout(self, x: Tensor, others: Mapping[str, Arguments]) -> torch.memory_format:
        """Return channels-last for images on a CPU, where convolutions are faster with it.

        The row is run both ways: blocks may take the one format only.
        """
        if x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32:
            return torch.preserve_format
        try:
            usual, other = (
                self._through(x.clone(memory_format=layout), others)
                for layout in (torch.preserve_format, torch.channels_last)
            )
        except Exception:  # the user's block may refuse a format in any way
            return torch.preserve_format
        agree = torch.allclose(usual, other, 1e-2, 1e-4)
        return torch.channels_last if agree else torch.preserve_format

    def _through(self, x: Tensor, others: Mapping[str, Arguments]) -> Tensor:
        """Return what the dense network's row gives for one batch."""
        for name in self.row.blocks:
            out = flowing(others[name].run(self.module(0, name), x, seed_of(name, 0)))
            assert out is not None  # the first look at the row has checked it
            x = out
        return x

    def module(self, side: int, name: str) -> nn.Module:
        """Return a block of one network."""
        return self.models[side].get_submodule(name)

    def run(self, side: int, name: str, index: int) -> Any:
        """Run one block of one network on one batch."""
        # A block may work in place, and its input is needed again.
        x = loaded(self.values[side][index])
        x = x.clone() if x is self.values[side][index] else x
        with user_code(f"running block '{name}'"), padded(self.masks[index]):
            seed = seed_of(name, index)
            return self.arguments[side][index][name].run(self.module(side, name), x, seed)

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
            listed = [before for before, _ in layers]
            inner, outer = candidates(dense), candidates(dense, outermost=True)
            plan = look(dense, batch, listed, inner)
            if not plan and outer != inner:
                plan = look(dense, batch, listed, outer)
    # A process without data follows the others.
    plans = [found for found in process_group().all_gather(plan) if found is not None]
    if not plans or any(found != plans[0] for found in plans) or not plans[0]:
        return None
    pairs = {before.name: (before, after) for before, after in layers}
    made: list[Block] = []
    for blocks, uniform, names in plans[0]:
        if not blocks:
            own = [pairs[name] for name in names]
            made.append(Rerun(dense, pruned, batches, own, hold_out=hold_out))
            continue
        streams = Streams((dense, pruned), batches, Row(blocks, uniform), hold_out)
        made += [
            Repeated(streams, block, [pairs[n] for n in pairs if n.startswith(f"{block}.")])
            for block in blocks
        ]
    return made
