"""Keep zeros at zero: hold, retrain, prune in stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

_HOMES = {
    "Hold": "lobs.training.hold",
    "apply_masks": "lobs.training.hold",
    "Retraining": "lobs.training.retrain",
    "Shuffled": "lobs.training.objectives",
    "distillation": "lobs.training.objectives",
    "sgd": "lobs.training.objectives",
    "Stage": "lobs.training.staged",
    "lightning_callback": "lobs.training.callbacks",
    "trainer_callback": "lobs.training.callbacks",
    "hold_adapters": "lobs.training.lora",
    "merge_lora": "lobs.training.lora",
    "merge_adapters": "lobs.training.lora",
}

__all__ = [
    "Hold",
    "Retraining",
    "Shuffled",
    "Stage",
    "apply_masks",
    "distillation",
    "hold_adapters",
    "lightning_callback",
    "merge_adapters",
    "merge_lora",
    "sgd",
    "trainer_callback",
]

if TYPE_CHECKING:
    from lobs.training.callbacks import lightning_callback, trainer_callback
    from lobs.training.hold import Hold, apply_masks
    from lobs.training.lora import hold_adapters, merge_adapters, merge_lora
    from lobs.training.objectives import Shuffled, distillation, sgd
    from lobs.training.retrain import Retraining
    from lobs.training.staged import Stage

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
