"""Read and write everything on disk: checkpoints, compact files, run stores, training state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "save_compact": "lobs.storage.checkpoint",
    "Checkpoint": "lobs.storage.checkpoint",
}

__all__ = ["Checkpoint", "save_compact"]

if TYPE_CHECKING:
    from lobs.storage.checkpoint import Checkpoint, save_compact

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
