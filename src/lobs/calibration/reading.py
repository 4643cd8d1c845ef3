"""Read batches as people have them: with labels, for several inputs, as lists or mappings.

Every batch becomes a tensor, or a mapping of the arguments that the network takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from lobs.errors import caution

_TAKES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """The arguments that a network's forward pass takes."""

    def __init__(self, model: nn.Module) -> None:
        try:
            found = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # compiled code has none
            found = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        self.network = type(model).__name__
        self.any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found)
        self.names = [p.name for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD]
        named = [p for p in found if p.kind in _TAKES]
        self.known = {p.name for p in found if p.kind not in (_TAKES[0], p.VAR_POSITIONAL)}
        self.required = [p.name for p in named if p.default is p.empty and p.name in self.known]

    def whole(self, batch: Any) -> dict[str, Any] | None:
        """Return a batch as the first argument's value; None where it has no name."""
        first = self.required[:1] or [name for name in self.names if name in self.known][:1]
        return {first[0]: batch} if first else None

    def __str__(self) -> str:
        return f"{self.network}.forward takes {', '.join(self.names) or 'no arguments'}"


def as_arguments(model: nn.Module, batch: Any) -> Any:
    """Return a batch as one tensor, or as a mapping of arguments; other values as they are.

    A tuple gives as many arguments as the network requires, so labels behind them are left out.
    Keys of a mapping that are no arguments are left out. Where none is one, the network's first
    argument is the mapping itself.
    """
    if not isinstance(batch, tuple | list | Mapping) or not len(batch):
        return batch
    takes = Signature(model)
    if isinstance(batch, Mapping):
        if takes.any_name or all(key in takes.known for key in batch):
            return batch
        known = {key: value for key, value in batch.items() if key in takes.known}
        missing = [name for name in takes.required if name not in known]
        if not missing:
            return known or batch
        return takes.whole(batch) if not known and len(missing) == 1 else batch
    if 1 < len(takes.required) <= len(batch):
        return dict(zip(takes.required, batch, strict=False))
    return batch[0]


def warn_of_dropped(model: nn.Module, batch: Any) -> None:
    """Warn of the keys of a batch that the network does not take."""
    read = as_arguments(model, batch)
    if isinstance(batch, Mapping) and isinstance(read, Mapping) and read is not batch:
        dropped = [str(key) for key in batch if key not in read]
        if dropped and not any(value is batch for value in read.values()):
            caution(
                f"batches hold {', '.join(dropped)}, but {Signature(model)}: only "
                f"{', '.join(map(str, read))} are passed on.",
                matter="dropped keys",
            )


def advice(model: nn.Module, batch: Any) -> str:
    """Return the line to write where a batch does not hold what the network requires."""
    takes = Signature(model)
    given = set(batch) if isinstance(batch, Mapping) else set(takes.required[:1])
    missing = [name for name in takes.required if name not in given]
    if not missing or (not isinstance(batch, Mapping) and len(takes.required) < 2):
        return ""
    entries = ", ".join(f"'{name}': …" for name in takes.required)
    return f"{takes}: write batches as {{{entries}}}."
