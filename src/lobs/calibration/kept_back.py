"""Divide batches into inputs that prune, inputs that choose and inputs that certify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lobs.calibration.batches import Batches
from lobs.calibration.forward import batch_size

KEPT_BACK = "kept back"  # the setting of a result that says what some inputs were kept back for
BOTH, CHOICE = "to choose and to certify", "to choose"
ROUND = 8
PRUNING, CHOOSING, CERTIFYING = range(4), range(4, 7), range(7, 8)


class Part(Batches):
    """Those samples of some batches whose number, modulo eight, is among the chosen ones."""

    def __init__(self, whole: Batches, chosen: Iterable[int]) -> None:
        super().__init__(whole.source, whole.name)
        self._whole = whole
        self._chosen = chosen

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in _pieces(self._whole, [self._chosen]))

    @property
    def steady(self) -> bool:
        """See `Batches`."""
        return self._whole.steady


def divided(batches: Batches, *, certify: bool = True) -> tuple[Batches, Batches, Batches | None]:
    """Return the inputs that prune, half of all; those that choose; and those that certify.

    Args:
        batches: the user's batches, which can be read again.
        certify: keep an eighth to certify; without it these inputs choose too.
    """
    choosing = CHOOSING if certify else [*CHOOSING, *CERTIFYING]
    chosen = [PRUNING, choosing, CERTIFYING if certify else ()]
    listed = isinstance(batches.source, list | tuple)
    if listed and all(batch_size(batch) >= ROUND for batch in batches):
        parts: list[Batches] = [Part(batches, part) for part in chosen]
    else:
        # A loader may shuffle, so one pass deals the samples. Small batches go to one part each.
        parts = _dealt(batches, chosen)
    return parts[0], parts[1], parts[2] if certify else None


def _dealt(batches: Batches, chosen: Sequence[Iterable[int]]) -> list[Batches]:
    """Return lists of the samples of each part, from one pass."""
    dealt: list[list[Any]] = [[] for _ in chosen]
    for part, batch in _pieces(batches, chosen):
        dealt[part].append(batch)
    return [Batches(part) for part in dealt]


def _pieces(batches: Batches, chosen: Sequence[Iterable[int]]) -> Iterator[tuple[int, Any]]:
    """Yield, batch by batch, the number of a part and those samples that belong to it."""
    wanted = [torch.tensor(sorted(part)) for part in chosen]
    first = 0
    for batch in batches:
        count = batch_size(batch)
        numbers = torch.arange(first, first + count) % ROUND
        first += count
        for part, own in enumerate(wanted):
            rows = torch.isin(numbers, own).nonzero().squeeze(1)
            if len(rows):
                yield part, _rows(batch, rows, count)


def _rows(value: Any, rows: Tensor, count: int) -> Any:
    """Return some rows of every tensor that has one for each sample."""
    if isinstance(value, Tensor):
        own = value.dim() > 0 and len(value) == count
        return value[rows.to(value.device)] if own else value
    if isinstance(value, Mapping):
        return {key: _rows(item, rows, count) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_rows(item, rows, count) for item in value]
    return value
