"""Say when calibration data are too few for the layers that they are to calibrate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lobs.pruning.result import LayerResult

_ENOUGH = 8  # vectors for every input of a layer; with fewer, more data still help clearly


def advice(layers: Sequence[LayerResult], data: Mapping[str, Any]) -> list[str]:
    """Return a line where the widest layer saw few vectors; nothing where there were enough.

    Args:
        layers: the pruned layers.
        data: what was drawn.
    """
    if not layers:
        return []

    def share(layer: LayerResult) -> float:
        return layer.samples / max(1, layer.total // max(1, layer.shape[0]))

    least = min(layers, key=share)
    columns = least.total // max(1, least.shape[0])
    if share(least) >= _ENOUGH:
        return []
    need = _ENOUGH * columns
    unit = "tokens" if data.get("tokens") else "vectors"
    return [
        f"Few calibration data: '{least.name}' has {columns:,} inputs and saw {least.samples:,} "
        f"{unit}. {need:,} or more would bring the pruned network nearer to the dense one."
    ]
