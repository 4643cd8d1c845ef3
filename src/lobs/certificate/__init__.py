"""Bound how far the output can have moved, and check saved results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "verify_masks": "lobs.certificate.verify",
    "verify_errors": "lobs.certificate.verify",
    "verify_guarantee": "lobs.certificate.verify",
    "verify_margins": "lobs.certificate.verify",
}

__all__ = ["verify_errors", "verify_guarantee", "verify_margins", "verify_masks"]

if TYPE_CHECKING:
    from lobs.certificate.verify import (
        verify_errors,
        verify_guarantee,
        verify_margins,
        verify_masks,
    )

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
