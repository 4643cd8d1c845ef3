"""Divide batches into inputs that prune, inputs that choose and inputs that certify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
        self._chosen = torch.tensor(sorted(chosen))

    def __iter__(self) -> Iterator[Any]:
        first = 0
        for batch in self._whole:
            count = batch_size(batch)
            rows = torch.isin(torch.arange(first, first + count) % ROUND, self._chosen).nonzero()
            first += count
            if len(rows):
                yield _rows(batch, rows.squeeze(1), count)

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
    parts: list[Batches] = [Part(batches, part) for part in (PRUNING, choosing, CERTIFYING)]
    if any(batch_size(batch) < ROUND for batch in batches):
        # Small batches go to one part each. Then each part has other batches, which are listed.
        parts = [Batches(list(part)) for part in parts]
    return parts[0], parts[1], parts[2] if certify else None


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
