"""The training loop: pass after pass over the data, evaluated and stored at intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs._system.progress import track
from lobs.calibration.batches import user_code
from lobs.calibration.forward import call, evaluating
from lobs.errors import TrainingError
from lobs.storage.train_state import TrainingState
from lobs.training.objectives import Loss, distillation
from lobs.training.settings import RetrainSettings


@dataclass(frozen=True, eq=False, repr=False)
class TrainingLoop:
    """Train a network on batches of data. All that changes is in the `TrainingState`."""

    data: Iterable[Any]
    settings: RetrainSettings

    def run(self, state: TrainingState, file: Path | None, identity: Mapping[str, Any]) -> None:
        """Train until the iterations are used up or the wanted score is reached.

        Args:
            state: network, optimiser, generators and counters; all of them change.
            file: the file that the state is stored in and resumed from, or None.
            identity: what a stored state must have been made with.
        """
        iterations = self.settings.iterations
        rates = [group["lr"] for group in state.optimizer.param_groups]
        if file is None or not state.load(file, identity):
            state.extra["pass"] = torch.get_rng_state()
            self._evaluate(state)
        batches = self._batches(state)
        with track("retrain", iterations) as advance:
            advance(state.counters["iteration"])
            while state.counters["iteration"] < iterations and not self.reached(state):
                at = state.counters["iteration"]
                for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * self.settings.rate(at / iterations)
                self._step(state, next(batches))
                state.counters["iteration"] = at + 1
                advance(1)
                if (at + 1) % self.settings.every == 0 or at + 1 == iterations:
                    self._evaluate(state)
                    if file is not None:
                        state.save(file, identity)

    def reached(self, state: TrainingState) -> bool:
        """Return whether the last score is the wanted one or better."""
        wanted = self.settings.until_score
        return wanted is not None and state.counters["history"][-1][1] >= wanted

    def _step(self, state: TrainingState, batch: Any) -> None:
        outputs = call(state.model, batch)
        wanted = self._wanted(batch, outputs)
        shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape"
        with user_code(f"the loss of {shapes} {tuple(wanted.shape)}"):
            loss = self._loss(outputs, wanted)
        if not bool(torch.isfinite(loss)):
            done = state.counters["iteration"]
            remedy = (
                "Use a smaller learning rate."
                if done
                else "Check the network and the first batch: nothing was trained yet."
            )
            raise TrainingError(
                f"the loss is {float(loss.detach())} after {done} iterations. {remedy}"
            )
        state.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()

    @property
    def _loss(self) -> Loss:
        default = F.cross_entropy if self.settings.teacher is None else distillation()
        return self.settings.loss or default

    def _wanted(self, batch: Any, outputs: Tensor) -> Tensor:
        """Return what the outputs are compared with: the teacher's outputs or the labels."""
        teacher = self.settings.teacher
        if teacher is not None:
            with evaluating(teacher):
                answer: Tensor = call(teacher, batch)
            return answer
        labelled = isinstance(batch, tuple | list) and len(batch) > 1
        if not (labelled and isinstance(batch[1], Tensor)):
            raise TrainingError(
                f"a batch of data is a {type(batch).__name__} without labels: give (input, label) "
                "pairs, or a teacher."
            )
        return batch[1].to(outputs.device)

    def _batches(self, state: TrainingState) -> Iterator[Any]:
        """Yield batches for ever. A resumed run skips the batches of its pass already used."""
        taken = state.counters["taken"]
        # Skipping draws the data order from the generator again. What dropout drew meanwhile is
        # restored afterwards.
        drawn = torch.get_rng_state() if taken else None
        while True:
            torch.set_rng_state(state.extra["pass"])
            for index, batch in enumerate(self.data):
                if index < taken:
                    continue
                drawn = _restored(drawn)
                state.counters["taken"] = index + 1
                yield batch
            if state.counters["taken"] == 0:
                raise TrainingError(
                    "there are no batches to train on: the data is empty, or a generator that is "
                    "used up."
                )
            drawn = _restored(drawn)  # a run interrupted at the end of a pass skips all of it
            state.counters["taken"], taken = 0, 0
            state.extra["pass"] = torch.get_rng_state()

    def _evaluate(self, state: TrainingState) -> None:
        if self.settings.evaluate is not None:
            # Evaluation must not change what training draws next.
            with torch.random.fork_rng(devices=[]):
                # Whatever mode the function leaves, training goes on in its own.
                with user_code("evaluate"), evaluating(state.model):
                    score = float(self.settings.evaluate(state.model))
                state.counters["history"].append([state.counters["iteration"], score])


def _restored(state: Tensor | None) -> Tensor | None:
    """Restore torch's generator if a state is given; return None, so that it happens once."""
    if state is not None:
        torch.set_rng_state(state)
    return None
