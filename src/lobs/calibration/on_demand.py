"""Compute moments on demand, for as many layers per pass over the data as fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from lobs._system import memory
from lobs.calibration.collect import Calibration, collect_moments
from lobs.calibration.moments import Moments
from lobs.layers import Layer
from lobs.storage.run_store import RunStore


@dataclass(frozen=True, eq=False)
class Gathered(Calibration):
    """Hold a calibration whose moments are summed by `prepare`, or at the first access.

    Without a memory limit one pass serves all layers. With a limit, each pass serves as many layers
    as fit, and the moments go to files. They are read anew at every access, so the caller may
    overwrite them.
    """

    model: nn.Module | None = None
    data: Iterable[Any] = ()
    layers: Mapping[str, Layer] = field(default_factory=dict)
    run_store: RunStore = field(default_factory=RunStore)
    room: float | None = None
    shelved: dict[str, memory.Shelved] = field(default_factory=dict)
    found: dict[str, Moments] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Moments:
        self.prepare()
        moments = self.found[name]
        if name not in self.shelved:
            return moments
        layer = self.layers[name]
        parts = {**moments.packed(), "whole": self.shelved[name].load()}
        return Moments.unpacked(parts, bias=layer.bias is not None, device=layer.weight.device)

    def prepare(self) -> None:
        """Sum the moments of all layers that have none yet.

        All processes of a group must call this together.
        """
        assert self.model is not None
        missing = [self.layers[name] for name in self.moments if name not in self.found]
        shelf = memory.Shelf() if missing and memory.limit() is not None else None
        for group in passes(missing, self.room):
            seen = collect_moments(
                self.model, self.data, group, run_store=self.run_store, key=_key(group)
            )
            for layer in group:
                self.found[layer.name] = seen[layer.name]
                if shelf is not None:
                    self.shelved[layer.name] = shelf.put(seen[layer.name].emptied())


def _key(group: Sequence[Layer]) -> str:
    """Return the key of a pass in the run store.

    It covers all layers of the pass, because a resumed run may fit other layers into one.
    """
    names = hashlib.sha256("\n".join(layer.name for layer in group).encode()).hexdigest()
    return f"moments {names[:16]}"


def gathered(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    run_store: RunStore,
    room: float | None,
    *,
    key: str = "calibration",
    every: int = 1,
) -> Gathered:
    """Count samples and vectors in one pass, and leave the moments for later.

    A layer that no batch reaches is missing in the result.

    Args:
        model: the network.
        batches: calibration batches that can be read again.
        layers: the layers whose moments will be wanted.
        run_store: where finished passes are kept.
        room: bytes for the moments of one pass; None for no limit.
        key: the name of the counting pass in the run store.
        every: run one batch in so many, as `collect_moments` does.
    """
    seen = collect_moments(
        model,
        batches,
        layers,
        run_store=run_store,
        key=key,
        counts_only=True,
        required=False,
        every=every,
    )
    known = {f.name: getattr(seen, f.name) for f in fields(Calibration)}
    return Gathered(
        **known,
        model=model,
        data=batches,
        layers={layer.name: layer for layer in layers},
        run_store=run_store,
        room=room,
    )


def passes(layers: Sequence[Layer], room: float | None) -> list[list[Layer]]:
    """Group layers whose moments fit together into `room` bytes, at least one layer each."""
    groups: list[list[Layer]] = []
    taken = 0.0
    for layer in layers:
        size = moment_bytes(layer)
        if not groups or (room is not None and taken + size > room):
            groups.append([])
            taken = 0.0
        groups[-1].append(layer)
        taken += size
    return groups


def moment_bytes(layer: Layer) -> int:
    """Return the bytes that the moments of a layer's inputs take while they are summed."""
    return (
        layer.groups
        * (layer.columns + 1) ** 2
        * (4 if memory.single_copy(layer.groups, layer.columns) else 8)
    )
