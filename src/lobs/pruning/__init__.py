"""Run a pruning: from `prune` and its options to the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "FolderResult": "lobs.pruning.folder",
    "Forecast": "lobs.pruning.forecast",
    "BudgetPreview": "lobs.pruning.preview",
    "PruningRecord": "lobs.pruning.result",
}

__all__ = ["BudgetPreview", "FolderResult", "Forecast", "PruningRecord"]

if TYPE_CHECKING:
    from lobs.pruning.folder import FolderResult
    from lobs.pruning.forecast import Forecast
    from lobs.pruning.preview import BudgetPreview
    from lobs.pruning.result import PruningRecord

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
