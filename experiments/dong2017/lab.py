"""Share networks, data, result files and the light retraining among all experiments."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lobs import zoo
from lobs._system.run_log import peak_bytes
from lobs.training.objectives import Shuffled, distillation
from lobs.training.retrain import Retraining, retrain
from lobs.training.staged import StageResult
from lobs.zoo.datasets import sets
from lobs.zoo.datasets.labelled import LabelledImages
from lobs.zoo.training import error_rate

HERE = Path(__file__).parent
# Training images for calibration. A convolution sees many patches of each, so it needs fewer.
CALIBRATION = {"lenet300": 60_000, "lenet5": 10_000, "cifarnet": 20_000, "cifarnet-wide": 20_000}


@dataclass(frozen=True)
class Lab:
    """Hold the settings of a run: its size, its folder and its seed."""

    out: Path
    quick: bool = False
    again: bool = False
    seed: int = 0
    say: Callable[[str], None] = lambda _: None

    def few(self, real: int, quick: int) -> int:
        """Return `quick` in the quick version, else `real`."""
        return quick if self.quick else real

    def path(self, name: str) -> Path:
        """Return a result's path."""
        return self.out / "results" / f"{name.replace('/', '-')}.json"

    def picture(self, name: str) -> Path:
        """Return a picture's path and make its folder."""
        folder = self.out / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.png"

    def found(self, name: str) -> dict[str, Any] | None:
        """Return a result that has a file, else None."""
        path = self.path(name)
        return json.loads(path.read_text()) if path.is_file() else None

    def result(self, name: str, work: Callable[[], dict[str, Any]], command: str) -> dict[str, Any]:
        """Return a result from its file, or do the work, timed, and write the file.

        A file of another seed or size is not used.
        """
        path, before = self.path(name), self.found(name)
        if (
            before is not None
            and not self.again
            and (before["seed"], before["quick"]) == (self.seed, self.quick)
        ):
            return before
        began, spent = time.perf_counter(), time.process_time()
        found = work()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        clocks = {"seconds": round(seconds, 1), "cpu_seconds": round(spent, 1)}
        head = {"name": name, "command": command, "seed": self.seed, **clocks, "quick": self.quick}
        found = {**head, "threads": torch.get_num_threads(), **found}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        os.replace(partial, path)  # never a half-written file
        self.say(f"{name}: {seconds:.0f} s")
        return found


@dataclass(frozen=True)
class Subject:
    """Hold a zoo network with the data to calibrate, train and test it."""

    name: str
    model: nn.Module
    train: LabelledImages
    test: list[tuple[torch.Tensor, torch.Tensor]]

    def error(self, model: nn.Module) -> float:
        """Return the test error in percent."""
        return error_rate(model, self.test)

    def score(self, model: nn.Module) -> float:
        """Return the test error with its sign changed: larger is better, as `retrain` wants it."""
        return -self.error(model)

    def calibration(self, lab: Lab) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return `CALIBRATION` training images, or the first 2,000 in the quick version."""
        return self.train.batches(1000, limit=lab.few(CALIBRATION[self.name], 2000))

    def shuffled(self, batch_size: int) -> Shuffled:
        """Return the training images in random order."""
        return Shuffled(self.train.images, self.train.labels, batch_size)


@cache
def subject(name: str) -> Subject:
    """Open a network whose images fit into memory."""
    data = zoo.entry(name).data
    train, test = sets.load(data, "train"), sets.load(data, "test")
    assert isinstance(train, LabelledImages) and isinstance(test, LabelledImages)
    return Subject(name, zoo.trained(name), train, test.batches(1000))


LIGHT_BATCH = 512
# LeNet-300-100's rate was chosen on held-out training images (tuning.py). The others take the same.
LIGHT_RATES = {"lenet300": 2e-3, "lenet5": 2e-3, "cifarnet": 2e-3, "cifarnet-wide": 2e-3}
STAGED_RATES = {"lenet300": 5e-3, "lenet5": 5e-3, "cifarnet": 2e-3}


def errors(history: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a history of scores as one of test errors."""
    return [(iteration, -score) for iteration, score in history]


def stage_row(stage: StageResult) -> dict[str, Any]:
    """Return a stage's numbers with test errors, as the result files hold them."""
    assert stage.pruned_score is not None and stage.score is not None
    return {
        "kept": stage.kept,
        "total": stage.total,
        "pruned_error": -stage.pruned_score,
        "error": -stage.score,
        "iterations": stage.iterations,
        "history": errors(stage.history),
    }


def light(
    who: Subject, model: nn.Module, masks: Any, iterations: int, seed: int, every: int = 50
) -> Retraining:
    """Retrain lightly: Adam with a cosine rate, batches of 512, no labels.

    The network learns the dense network's outputs.
    """
    return retrain(
        model,
        masks,
        who.shuffled(LIGHT_BATCH),
        evaluate=who.score,
        every=every,
        iterations=iterations,
        progress=False,
        **light_settings(who, seed),
    )


def light_settings(
    who: Subject, seed: int, rates: dict[str, float] = LIGHT_RATES
) -> dict[str, Any]:
    """Return the options of `retrain` that make it light."""
    rate = rates[who.name]
    return {
        "optimizer": lambda parameters: torch.optim.Adam(parameters, rate),
        "decay": "cosine",
        "teacher": who.model,
        "loss": distillation(2.0),
        "seed": seed,
    }


def peak_gigabytes() -> float | None:
    """Return the most memory that this process has used; None where the system does not say."""
    most = peak_bytes()
    return None if most is None else most / 2**30
