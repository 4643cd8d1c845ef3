"""Which samples weights are fitted to, and which only judge them: an eighth is kept back.

Of many batches one in eight; of few the last eighth of each, where the network answers to parts of
a batch as to the whole. Several processes keep back what one alone would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.forward import batch_size, length, plain_input
from lobs.pruning.refit.gauss_newton import separable

KEPT_BACK = 8
SMALL = 2 * KEPT_BACK  # batches of fewer samples are not cut


@dataclass(frozen=True)
class Split:
    """Batches to work on, a portion of all, and batches that are kept back.

    `joins` if the network answers to some joined as to each.
    """

    batches: Iterable[Any]
    portion: float
    joins: bool
    worked_on: Callable[[int, Any], list[Any]]
    held: Callable[[int, Any], list[Any]]

    def at_work(self, *, forever: bool = False) -> Iterator[Any]:
        """What is worked on, once, or round and round for as long as there are samples."""
        return _stream(self.batches, self.worked_on, forever=forever)

    def kept_back(self) -> Iterator[Any]:
        """What is not, once."""
        return _stream(self.batches, self.held)


def split(network: nn.Module, batches: Iterable[Any], most: int, needed: int) -> Split | None:
    """Part batches, which have a length, for a network; None where nothing can be kept back.

    A step works on `most` samples of this process, all of them on as many as `needed`.
    """
    group = process_group()
    with group.raise_together():
        batches = _steady(batches, needed)
        first_two = list(islice(batches, 2))
    counts: list[int] = group.all_gather(length(batches) or 0)
    if sum(counts) < KEPT_BACK:
        parts = [part for side in _cut(first_two[0], most) for part in side] if first_two else []
        cut = len(parts) > 1 and separable(network, [parts[0], parts[-1]])
        # One that has no batches, or small ones first, goes with the others.
        if all(group.all_gather(cut or len(parts) <= 1)) and any(group.all_gather(cut)):
            worked_on, held = (
                lambda _, batch, side=side: _cut(batch, most)[side] for side in (0, 1)
            )
            return Split(batches, 1 - 1 / KEPT_BACK, True, worked_on, held)
    if sum(counts) < 2:
        return None
    every = min(KEPT_BACK, sum(counts))

    def back(index: int) -> bool:
        """Whether a batch of this process would be an eighth one if one process had been given all in turns."""
        number = sum(min(count, index) for count in counts) + sum(
            count > index for count in counts[: group.rank]
        )
        return number % every == every - 1

    return Split(
        batches,
        1 - 1 / every,
        separable(network, first_two),
        lambda index, batch: [] if back(index) else [batch],
        lambda index, batch: [batch] if back(index) else [],
    )


def some(batches: Iterator[Any], samples: int) -> list[Any]:
    """The next batches with so many samples, or as many as there are."""
    found, seen = [], 0
    for batch in batches:
        found.append(batch)
        seen += batch_size(batch)
        if seen >= samples:
            break
    return found


def _cut(batch: Any, most: int) -> tuple[list[Any], list[Any]]:
    """Seven eighths of a batch, in pieces of at most so many samples, and the last eighth; of a small one only itself."""
    x = plain_input(batch)
    if x is None or len(x) < SMALL:
        return [batch], []
    edge = len(x) - len(x) // KEPT_BACK
    pieces = -(-edge // max(1, most))
    return list(torch.split(x[:edge], -(-edge // pieces))), [
        x[edge:].clone()
    ]  # not a view: it outlives the batch


def _steady(batches: Iterable[Any], samples: int) -> Iterable[Any]:
    """The same batches if they come in the same order each time, else as many as will be needed, read once.

    What is kept back must not come again in another batch.
    """
    first, again = (next(iter(batches), None) for _ in range(2))
    return batches if _same(first, again) else some(iter(batches), samples)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return not (isinstance(a, Tensor) or isinstance(b, Tensor))


def _stream(
    batches: Iterable[Any], wanted: Callable[[int, Any], list[Any]], *, forever: bool = False
) -> Iterator[Any]:
    """What is wanted of each batch; once, or for as long as it has samples."""
    while True:
        found = 0
        for index, batch in enumerate(batches):
            for part in wanted(index, batch):
                found += batch_size(part)
                yield part
        if not (forever and found):
            return
