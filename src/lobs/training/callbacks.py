"""Callbacks that hold zeros in Lightning and in Hugging Face's Trainer.

Neither framework is imported here. If a framework is already imported, the callback derives from
its callback class. Otherwise it is a plain object with the right methods.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lobs.training.hold import Hold, hold


class _Holder:
    """Hold a network's zeros from the beginning of training to its end, even if training fails."""

    masks: Mapping[str, Tensor]
    part: str
    held: Hold | None = None

    def begin(self, model: nn.Module) -> None:
        """Hook every optimiser that steps the network."""
        self.end()
        self.held = hold(model.get_submodule(self.part) if self.part else model, self.masks)

    def end(self) -> None:
        """Remove the hooks."""
        if self.held is not None:
            self.held.remove()
            self.held = None


class _LightningHold(_Holder):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning restores weights from a checkpoint after on_fit_start.
        if self.held is not None:
            self.held.apply()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()


class _TrainerHold(_Holder):
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.begin(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()


def lightning_callback(masks: Mapping[str, Tensor], part: str = "") -> Any:
    """Return a Lightning callback that keeps zeros.

    Use it as `Trainer(callbacks=[lobs.training.lightning_callback(masks, "model")])`.

    Args:
        masks: True = kept, by name within the part.
        part: the attribute of the LightningModule that is the pruned network; by default the module
            itself.
    """
    return _of(
        _LightningHold,
        masks,
        part,
        [("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback")],
    )


def trainer_callback(masks: Mapping[str, Tensor], part: str = "") -> Any:
    """Return a Hugging Face callback that keeps zeros.

    Use it as `Trainer(..., callbacks=[lobs.training.trainer_callback(masks)])`.

    Args:
        masks: True = kept, by name within the part.
        part: the attribute of the model that is the pruned network; by default the model itself.
    """
    return _of(_TrainerHold, masks, part, [("transformers", "TrainerCallback")])


def _of(
    kind: type[_Holder], masks: Mapping[str, Tensor], part: str, frameworks: list[tuple[str, str]]
) -> Any:
    """Make a callback that derives from the frameworks' classes that are imported."""
    bases = [
        getattr(sys.modules[module], name) for module, name in frameworks if module in sys.modules
    ]
    callback = type(kind.__name__.strip("_"), (kind, *bases, *([] if bases else [_Quiet])), {})()
    callback.masks, callback.part = dict(masks), part
    return callback


class _Quiet:
    """Ignore every other event of a framework."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown", "state_dict", "load_state_dict"):
            return lambda *_, **__: None
        raise AttributeError(name)
