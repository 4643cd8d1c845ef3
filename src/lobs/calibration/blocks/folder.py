"""Blocks of a network in a folder: one block is in memory at a time, dense and pruned.

The network cannot run as a whole. Its skeleton runs instead, with blocks that return their input.
That shows what every block is called with, up to the last block. It also shows whether each block
gets what the block before it returned. The head is never needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.batches import user_code
from lobs.calibration.blocks.arguments import Arguments, flowing
from lobs.calibration.blocks.base import StopRun
from lobs.calibration.blocks.repeated import Repeated, Streams
from lobs.calibration.blocks.rows import Row, captured
from lobs.calibration.blocks.skeleton import Skeleton, same_form
from lobs.calibration.forward import call
from lobs.errors import BlocksError, CalibrationError
from lobs.storage.shards import Shards

# Bytes of activations in memory: at least these, or a quarter of the network. Who prunes from a
# folder wants to use less memory than the network takes; the rest goes to temporary files.
_LEAST_HELD = 2**28
_CHANGE = 1.01  # factor on every block's output, to see which arguments follow the activations
_NO_BATCH = "batches is empty: give at least one batch."
_REMEDY = "so blocks cannot run one by one. Use lobs.prune with the network in memory."


@dataclass
class FolderStreams(Streams):
    """The activations of both networks; `pair` is the block that is in memory."""

    pair: tuple[nn.Module, nn.Module] | None = None

    def module(self, side: int, name: str) -> nn.Module:
        """See `Streams`."""
        assert self.pair is not None
        return self.pair[side]


class FolderBlocks:
    """A network in a folder as a row of blocks, walked in order.

    Args:
        skeleton: the network without weights.
        batches: the calibration data, which can be read more than once.
        hold_out: keep one sample in eight out of the layers' moments.
    """

    def __init__(self, skeleton: Skeleton, batches: Iterable[Any], *, hold_out: bool) -> None:
        self.skeleton, self.batches, self.hold_out = skeleton, batches, hold_out
        self.row, self.odd = Row(skeleton.blocks, True), ""
        self._form: Callable[[Tensor], Any] = lambda x: x

    def look(self) -> int:
        """Run one batch through the skeleton and the first block; check that blocks make a row.

        Returns the bytes of the batch's activations. With several processes, what is odd about the
        blocks waits until they `agree`.
        """
        try:
            return self._look()
        except BlocksError as error:
            if process_group().size == 1:
                raise
            self.row, self.odd = Row([], True), str(error)
            return 0

    def _look(self) -> int:
        batch = next(iter(self.batches), None)
        if batch is None and process_group().size > 1:
            self.row = Row([], True)  # `agree` takes the other processes' row
            return 0
        if batch is None:
            raise CalibrationError(_NO_BATCH)
        first = self.skeleton.blocks[0]
        with self.skeleton.running(self._pass):
            x, others = captured(self.skeleton.model, batch, Row([first], True))
        block, before = self.skeleton.filled(first), memory.resident()
        with memory.most_resident() as most, user_code(f"running block '{first}'"):
            out = others[first].run(block, x)
        if flowing(out) is None:
            raise BlocksError(
                f"block '{first}' returned {type(out).__name__}, not a tensor or a tuple that "
                f"begins with one, {_REMEDY}"
            )
        self._form = same_form(out)
        self.row = self._checked(self._calls(batch, 1.0), self._calls(batch, _CHANGE))
        held = x.numel() * x.element_size()
        return max(4 * held, most[0] - before)

    def agree(self) -> None:
        """Take one row in all processes: a process without data follows the others."""
        _refuse_together(self.odd)
        rows = process_group().all_gather([self.row.blocks, self.row.uniform])
        seen = [row for row in rows if row[0]]
        if not seen:
            raise CalibrationError(_NO_BATCH)
        odd = next((row for row in seen if row[0] != seen[0][0]), None)
        if odd is not None:
            raise BlocksError(f"the order of blocks follows the data, {_REMEDY}")
        self.row = Row(list(seen[0][0]), all(uniform for _, uniform in seen))

    def start(self, reserved: int = 0) -> None:
        """Run all batches up to the first block.

        Args:
            reserved: bytes of a memory limit that the work on a block will need.
        """
        model, limit = self.skeleton.model, memory.limit()
        size = sum(entry.bytes for entry in self.skeleton.shards.entries.values())
        self.streams = FolderStreams(
            (model, model), self.batches, self.row, self.hold_out, max(_LEAST_HELD, size // 4)
        )
        left = None if limit is None else max(0, limit - reserved)
        if self.hold_out:  # the first block tells whether a batch can be cut
            first = self.skeleton.filled(self.row.blocks[0])
            self.streams.pair = first, first
        odd = ""
        with (
            process_group().raise_together(),
            memory.limited(left),
            self.skeleton.running(self._pass),
        ):
            try:
                self.streams.start()
            except BlocksError as error:
                if process_group().size == 1:
                    raise
                odd = str(error)
        _refuse_together(odd)
        self.drop()
        # Both networks are still the same one, so their blocks are called with the same.
        self.streams.arguments[1] = self.streams.arguments[0]

    def block(self, name: str, layers: Sequence[str]) -> Repeated:
        """Read a block, dense and as a copy to prune, and return it.

        Args:
            name: the block's name.
            layers: names of its layers to prune.
        """
        self.drop()
        dense = self.skeleton.filled(name)
        pruned = copy.deepcopy(dense)
        self.streams.pair = dense, pruned
        views = [
            self.skeleton.layers_of(name, side, layers) if layers else []
            for side in (dense, pruned)
        ]
        return Repeated(self.streams, name, list(zip(*views, strict=True)))

    def pass_over(self, name: str, finished: Shards) -> None:
        """Run both networks through a block that was pruned before.

        Args:
            name: the block's name.
            finished: where its pruned tensors are.
        """
        self.drop()
        self.streams.pair = self.skeleton.filled(name), self.skeleton.filled(name, finished)
        for side in (0, 1):
            self.streams.advance(side, name)

    def pruned(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the pruned block that is in memory, and drop the dense one."""
        assert self.streams.pair is not None
        state = self.streams.pair[1].state_dict()
        self.drop()
        return {full: state[full.removeprefix(f"{name}.")] for full in self.skeleton.names_of(name)}

    def drop(self) -> None:
        """Forget the block that is in memory."""
        self.streams.pair = None

    def _pass(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a block's input as its output."""
        x, _ = Arguments.of(args, kwargs)
        if x is None:
            raise BlocksError(f"block '{name}' is not called with a tensor first, {_REMEDY}")
        return self._form(x)

    def _calls(self, batch: Any, change: float) -> list[tuple[str, bool, Arguments]]:
        """Return every block's call: its name, whether it follows the last one, its arguments."""
        calls: list[tuple[str, bool, Arguments]] = []
        given: list[Tensor] = []

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            x, others = Arguments.of(args, kwargs)
            if x is None:
                raise BlocksError(f"block '{name}' is not called with a tensor first, {_REMEDY}")
            calls.append((name, not calls or x is given[-1], others))
            given[:] = [x * change]
            return self._form(given[-1])

        def finished() -> bool:
            return len(calls) >= len(self.skeleton.blocks)

        # The run ends at the module after the last block. Until then a block may run again.
        with self.skeleton.running(forward, finished), suppress(StopRun):
            try:
                call(self.skeleton.model, batch)
            except CalibrationError:
                if not finished():  # the head may use weights that were not read
                    raise
        return calls

    def _checked(
        self,
        plain: Sequence[tuple[str, bool, Arguments]],
        moved: Sequence[tuple[str, bool, Arguments]],
    ) -> Row:
        """Return the row in running order; refuse blocks that do not simply follow each other."""
        order = [name for name, _, _ in plain]
        odd = next((b for b in self.skeleton.blocks if order.count(b) != 1), None)
        if odd is not None:
            raise BlocksError(f"block '{odd}' runs {order.count(odd)} times, {_REMEDY}")
        for (before, _, _), (after, follows, _) in pairwise(plain):
            if not follows:
                raise BlocksError(
                    f"block '{after}' does not get what block '{before}' returned, {_REMEDY}"
                )
        uniform = all(plain[0][2].same(others) for _, _, others in plain)
        for (name, _, a), (_, _, b) in zip(plain, moved, strict=False):
            if not uniform and not a.same(b, torch.equal):
                raise BlocksError(
                    f"arguments of block '{name}' follow the activations before it, {_REMEDY}"
                )
        return Row(order, uniform)


def _refuse_together(odd: str) -> None:
    """Raise `BlocksError` in all processes if it is raised in one; `raise_together` has no kinds.

    Args:
        odd: what is odd about this process's blocks; empty where nothing is.
    """
    fault = next(filter(None, process_group().all_gather(odd)), None)
    if fault is not None:
        raise BlocksError(fault)
