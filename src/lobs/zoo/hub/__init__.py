"""Networks in folders, as Hugging Face's transformers and timm keep them.

A folder goes in and a folder comes out: `from_pretrained` loads both. `lobs.hub.prune` needs the
extra `lobs[hub]`; `verify` and `masks` need nothing more than lobs itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "HubResult": "lobs.zoo.hub.record",
    "Reading": "lobs.zoo.hub.rows",
    "compare": "lobs.zoo.hub.comparing",
    "evaluate": "lobs.zoo.hub.measuring",
    "masks": "lobs.zoo.hub.checking",
    "prune": "lobs.zoo.hub.pruning",
    "verify": "lobs.zoo.hub.checking",
}

__all__ = ["HubResult", "Reading", "compare", "evaluate", "masks", "prune", "verify"]

if TYPE_CHECKING:
    from lobs.zoo.hub.checking import masks, verify
    from lobs.zoo.hub.comparing import compare
    from lobs.zoo.hub.measuring import evaluate
    from lobs.zoo.hub.pruning import prune
    from lobs.zoo.hub.record import HubResult
    from lobs.zoo.hub.rows import Reading

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
