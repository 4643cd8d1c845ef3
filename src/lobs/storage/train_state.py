"""Store a training run's whole state in one safetensors file.

Weights, optimiser state and random generators are tensors. Learning-rate schedules and counters are
JSON in the header. A run resumed from the file ends with the same bits as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lobs.errors import FileError
from lobs.storage import checkpoint

KIND = "training state"


class Schedule(Protocol):
    """Anything with the state of a torch learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the schedule's state."""
        ...


@dataclass(eq=False, repr=False)
class TrainingState:
    """Everything that changes while a network trains.

    `generator` draws the order of the data. The state of torch's own generator is stored too.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    schedule: Schedule | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write the state, atomically. `load` needs the same `settings`."""
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"extra.{name}": t for name, t in self.extra.items()}
        tensors |= {
            "random.order": self.generator.get_state(),
            "random.torch": torch.get_rng_state(),
        }
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{index}.{key}": v for key, v in values.items() if isinstance(v, Tensor)
            }
        schedule = None if self.schedule is None else _plain(self.schedule.state_dict())
        rates = [group["lr"] for group in self.optimizer.param_groups]
        record = {
            "kind": KIND,
            "settings": dict(settings),
            "counters": self.counters,
            "schedule": schedule,
            "rates": rates,
        }
        checkpoint.save(tensors, path, record=record)

    def load(self, path: Path, settings: Mapping[str, Any]) -> bool:
        """Restore the state and return True, or return False if there is no file.

        A file of another run raises `FileError`.
        """
        if not path.is_file():
            return False
        saved = checkpoint.load(path)
        if saved.record.get("kind") != KIND:
            raise FileError(f"'{path}' is not a training state. Give another path to write it to.")
        for key, value in settings.items():
            before = saved.record["settings"].get(key)
            if before != value:
                raise FileError(
                    f"'{path}' belongs to a run with {key} = {before}, not {value}. Delete it, or "
                    "give another path."
                )
        self._restore(saved)
        return True

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {
                n.removeprefix(prefix): t
                for n, t in saved.state_dict.items()
                if n.startswith(prefix)
            }

        self.model.load_state_dict(part("model."))
        self.extra = part("extra.")
        self.generator.set_state(saved.state_dict["random.order"])
        torch.set_rng_state(saved.state_dict["random.torch"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in part("optimizer.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if self.schedule is not None and saved.record["schedule"] is not None:
            self.schedule.load_state_dict(saved.record["schedule"])
        for group, rate in zip(self.optimizer.param_groups, saved.record["rates"], strict=True):
            group["lr"] = rate
        self.counters = dict(saved.record["counters"])


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the values that JSON can hold. Functions in a schedule come from the new run."""
    kinds = (int, float, str, bool, list, type(None))
    return {key: value for key, value in state.items() if isinstance(value, kinds)}
