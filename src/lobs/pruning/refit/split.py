"""Split the calibration data: weights are fitted to most samples, and one in eight is held out.

Of many batches one in eight is held out. Of few batches it is the last eighth of each, where the
network treats parts of a batch like the whole. Several processes hold out the samples that a single
process would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.blocks import KEPT_BACK
from lobs.calibration.forward import batch_size, length, plain_input
from lobs.pruning.refit.gauss_newton import separable

SMALL = 2 * KEPT_BACK  # batches of fewer samples are not cut


@dataclass(frozen=True)
class Split:
    """Batches to fit to, which are `portion` of all, and held-out batches.

    `joins` says that the network treats batches the same whether they are joined or not.
    """

    batches: Iterable[Any]
    portion: float
    joins: bool
    worked_on: Callable[[int, Any], list[Any]]
    held: Callable[[int, Any], list[Any]]

    def at_work(self, *, forever: bool = False) -> Iterator[Any]:
        """Yield the batches to fit to, once or, if `forever`, again and again."""
        return _stream(self.batches, self.worked_on, forever=forever)

    def kept_back(self) -> Iterator[Any]:
        """Yield the held-out batches once."""
        return _stream(self.batches, self.held)


def split(network: nn.Module, batches: Iterable[Any], most: int, needed: int) -> Split | None:
    """Split batches of known length for a network; return None where nothing can be held out.

    Args:
        network: the dense network.
        batches: the calibration data.
        most: number of this process's samples in one step.
        needed: number of its samples in all steps.
    """
    group = process_group()
    with group.raise_together():
        batches = _steady(batches, needed)
        first_two = list(islice(batches, 2))
    counts: list[int] = group.all_gather(length(batches) or 0)
    if sum(counts) < KEPT_BACK:
        parts = [part for side in _cut(first_two[0], most) for part in side] if first_two else []
        cut = len(parts) > 1 and separable(network, [parts[0], parts[-1]])
        # A process without batches, or with small ones first, follows the others.
        if all(group.all_gather(cut or len(parts) <= 1)) and any(group.all_gather(cut)):
            worked_on, held = (
                lambda _, batch, side=side: _cut(batch, most)[side] for side in (0, 1)
            )
            return Split(batches, 1 - 1 / KEPT_BACK, True, worked_on, held)
    if sum(counts) < 2:
        return None
    every = min(KEPT_BACK, sum(counts))

    def back(index: int) -> bool:
        """Return whether this batch is held out, counting all processes' batches in turn."""
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
    """Return the next batches up to a number of samples, or all that are left."""
    found, seen = [], 0
    for batch in batches:
        found.append(batch)
        seen += batch_size(batch)
        if seen >= samples:
            break
    return found


def _cut(batch: Any, most: int) -> tuple[list[Any], list[Any]]:
    """Cut a batch into pieces of at most `most` samples and the held-out last eighth."""
    x = plain_input(batch)
    if x is None or len(x) < SMALL:
        return [batch], []
    edge = len(x) - len(x) // KEPT_BACK
    pieces = -(-edge // max(1, most))
    held = x[edge:].clone()  # not a view: it outlives the batch
    return list(torch.split(x[:edge], -(-edge // pieces))), [held]


def _steady(batches: Iterable[Any], samples: int) -> Iterable[Any]:
    """Return batches that come in the same order each time: the given ones, or a list read once.

    A held-out sample must not come back in another batch.
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
    """Yield the wanted parts of each batch, once or forever."""
    while True:
        found = 0
        for index, batch in enumerate(batches):
            for part in wanted(index, batch):
                found += batch_size(part)
                yield part
        if not (forever and found):
            return
