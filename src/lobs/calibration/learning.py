"""Learn how a network uses its weights, by running it on one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lobs._system.distributed import process_group
from lobs.calibration.forward import call, evaluating
from lobs.layers.discovery import open_questions
from lobs.layers.uses import learnt, teach, watched


def learn(model: nn.Module, batches: Iterable[Any], *, always: bool = False) -> None:
    """Watch one forward pass where the modules' classes leave open how weights are used.

    Args:
        model: the network.
        batches: the calibration data, of which the first batch is run.
        always: watch even where all classes are known.
    """
    if learnt(model) is not None or not (always or open_questions(model)):
        return
    with process_group().raise_together(), evaluating(model):
        for batch in batches:
            with watched(model):
                call(model, batch)
            break
    found = [known for known in process_group().all_gather(learnt(model)) if known is not None]
    if found:
        teach(model, found[0])
