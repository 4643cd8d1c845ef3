"""Networks in folders, as Hugging Face's transformers and timm keep them.

A folder goes in and a folder comes out: `from_pretrained` loads both. `lobs.hub.prune` needs the
extra `lobs[hub]`; `verify` and `masks` need nothing more than lobs itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "HubResult": "lobs.hub.record",
    "Reading": "lobs.hub.rows",
    "compare": "lobs.hub.comparing",
    "evaluate": "lobs.hub.measuring",
    "masks": "lobs.hub.checking",
    "prune": "lobs.hub.pruning",
    "verify": "lobs.hub.checking",
}

__all__ = ["HubResult", "Reading", "compare", "evaluate", "masks", "prune", "verify"]

if TYPE_CHECKING:
    from lobs.hub.checking import masks, verify
    from lobs.hub.comparing import compare
    from lobs.hub.measuring import evaluate
    from lobs.hub.pruning import prune
    from lobs.hub.record import HubResult
    from lobs.hub.rows import Reading

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
