"""Collect the inputs of a block's layers in the dense and in the pruned network, side by side.

A layer is pruned on the outputs of the pruned layers before it, in its block and in earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.blocks import Block, LayerPair
from lobs.calibration.moments import PairedMoments
from lobs.layers import Layer, watching


def layers_of(
    block: Block, known: Collection[str] = ()
) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Yield a block's layers of the pruned network in running order, with their input moments.

    Layers with the same input share a run. The caller writes each layer before it asks for the
    next.

    Args:
        block: the block.
        known: names of layers whose solution exists already; they come without moments.
    """
    groups = _sharing_inputs(block)
    if memory.limit() is not None:
        # One run per layer costs time; the moments of several layers at once cost memory.
        groups = [[pair] for group in groups for pair in group]
    for together in groups:
        wanted = [pair for pair in together if pair[0].name not in known]
        moments = {before.name: PairedMoments(before) for before, _ in wanted}
        judges = {before.name: PairedMoments(before) for before, _ in wanted if block.holds_out}
        with (
            process_group().raise_together(),
            track(f"inputs of {together[0][0].name}", None) as advance,
        ):
            for _ in block.observe(wanted, moments) if wanted else ():
                advance(1)
            for _ in block.observe(wanted, judges, held_out=True) if judges else ():
                pass
        for moment in (*moments.values(), *judges.values()):
            moment.join()
        for name, judge in judges.items():
            moments[name].held_out = judge if judge.pruned.count else None
        for before, after in together:
            yield after, moments.get(before.name)


def _sharing_inputs(block: Block) -> list[list[LayerPair]]:
    """Group the layers that one run can serve: neighbours whose input is the same tensor object."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> None:
        # The tensors themselves are kept: the id of a freed tensor may be used again.
        seen.setdefault(name, []).append(x)

    with (
        process_group().raise_together(),
        watching(before.on_input(partial(note, before.name)) for before, _ in block.layers),
    ):
        block.run_dense_once()
    block.calls = {name: len(inputs) for name, inputs in seen.items()}
    pairs = {before.name: (before, after) for before, after in block.layers}
    groups: list[list[str]] = []
    for name in seen:
        same = groups and _identical(seen[groups[-1][-1]], seen[name])
        groups[-1].append(name) if same else groups.append([name])
    # A process without data has seen no layer, yet all processes must take them in one order.
    gathered = process_group().all_gather([groups, block.calls])
    groups, block.calls = next((found for found in gathered if found[0]), ([], {}))
    return [[pairs[name] for name in group] for group in groups]


def _identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
