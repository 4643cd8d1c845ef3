"""How few weights will do: a network is pruned at several budgets and scored, until a largest drop is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from lobs.calibration.batches import user_code
from lobs._system.distributed import process_group
from lobs.errors import LobsError, caution
from lobs.pruning.session import Job
from lobs.storage.run_store import RunStore
from lobs.pruning.run import Outcome, run
from lobs._system.progress import track
from lobs.calibration.forward import evaluating
from lobs.targets import Budget, removable

Evaluate: TypeAlias = Callable[[nn.Module], float]
LOOKS = 8
_NEXT_TO_NOTHING = 0.01


@dataclass(frozen=True)
class Trial:
    """One look at a score on the way to a largest drop."""

    kept: int
    score: float
    drop: float


def search(
    job: Job, budget: Budget, drop: float, evaluate: Evaluate, *, looks: int = LOOKS
) -> tuple[Outcome, list[Trial]]:
    """The fewest weights whose score stays within `drop` of the dense network's, by bisection of log(kept).

    Every trial prunes anew, shared out once, and is reported. The answer is the smallest network
    that was tried and passed; where none did, the one with nothing removed but what the budget's
    ceilings force.
    """
    dense = _score(evaluate, job.model, job.run_store, "dense score")
    total = sum(job.prunable.values())
    trials: list[Trial] = []
    best: Outcome | None = None
    limits = [removable(budget, name, n) for name, n in job.prunable.items()]
    forced, most = (sum(part) for part in zip(*limits, strict=True))
    low, high = math.log(max(1, total // 1000, total - most)), math.log(max(1, total - forced))
    with track("trials", looks) as advance:
        for look in range(looks):
            # The first look guesses where most networks break; the others halve what is left.
            middle = max(low, high + math.log(0.1)) if look == 0 else (low + high) / 2
            kept = min(max(1, total - most, round(math.exp(middle))), total - forced)
            outcome = run(job, job.shared(budget, total - kept))
            score = _score(evaluate, outcome.model, job.run_store, f"run {outcome.number} score")
            outcome.apart = None  # the user's function has had the network in its hands
            trials.append(Trial(kept, score, dense - score))
            if dense - score <= drop:
                best, high = outcome, math.log(kept)
            else:
                low = math.log(kept)
            advance(1)
            if high - low < math.log(1.03):
                break
    _doubt(trials, dense, total)
    if best is None:
        nearest = min(trials, key=lambda trial: trial.drop)
        caution(
            f"none of {len(trials)} trials stayed within {drop:g} of the dense score {dense:.4g}: "
            "the best lost "
            f"{nearest.drop:.4g} with {nearest.kept:,} of {total:,} weights. Nothing but what "
            "limits force was removed: allow "
            "more, or use more data."
        )
    return best or run(job, job.shared(budget, forced)), trials


def _doubt(trials: list[Trial], dense: float, total: int) -> None:
    """Say so where next to nothing is kept and the score has risen: then it is an error, most likely."""
    least = min(trials, key=lambda trial: trial.kept)
    if least.score > dense and least.kept <= _NEXT_TO_NOTHING * total:
        caution(
            f"with {least.kept:,} of {total:,} weights evaluate gives {least.score:.4g}, with all "
            f"of them {dense:.4g}. "
            "It must return a score of which more is better; to use an error, return its negative."
        )


def _score(evaluate: Evaluate, model: nn.Module, run_store: RunStore, key: str) -> float:
    saved = run_store.read(key)
    if saved is not None:
        return float(saved.record["score"])
    score = 0.0
    with process_group().raise_together():
        if process_group().leads:
            with (
                user_code("evaluate"),
                evaluating(model),
            ):  # a function that forgets eval mode would train batch norms
                value = evaluate(model)
            try:
                score = float(value)
            except (TypeError, ValueError):
                raise LobsError(
                    f"evaluate returned {value!r}; it must return a number, larger is better."
                ) from None
            if math.isnan(score):
                raise LobsError("evaluate returned NaN; it must return a number, larger is better.")
    score = float(process_group().all_gather(score)[0])
    run_store.write(key, {}, {"score": score})
    return score
