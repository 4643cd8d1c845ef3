"""Make pruned networks smaller, faster and portable: shrink, accelerate, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "Shrinkage": "lobs.deploy.shrink",
    "Acceleration": "lobs.deploy.accelerate",
    "export_program": "lobs.deploy.export",
    "to_semi_structured": "lobs.deploy.export",
    "from_torch_prune": "lobs.deploy.export",
    "to_torch_prune": "lobs.deploy.export",
}

__all__ = [
    "Acceleration",
    "Shrinkage",
    "export_program",
    "from_torch_prune",
    "to_semi_structured",
    "to_torch_prune",
]

if TYPE_CHECKING:
    from lobs.deploy.accelerate import Acceleration
    from lobs.deploy.export import (
        export_program,
        from_torch_prune,
        to_semi_structured,
        to_torch_prune,
    )
    from lobs.deploy.shrink import Shrinkage

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
