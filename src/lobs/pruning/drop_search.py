"""Drop search: the smallest network whose score stays within a given drop of the dense score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.batches import user_code
from lobs.calibration.forward import evaluating
from lobs.errors import LobsError, caution, clipped
from lobs.pruning.run import Run, start_run
from lobs.pruning.session import Session
from lobs.storage.run_store import RunStore
from lobs.targets import Budget, removable

Evaluate: TypeAlias = Callable[[nn.Module], float]
TRIALS = 8
_FIRST_KEPT = 0.1  # kept fraction of the first trial: most networks break near it
_CLOSE = 1.03  # the search ends when kept counts differ by less than this factor
_NEARLY_NOTHING = 0.01  # kept fraction at which a score above the dense one must be an error rate


@dataclass(frozen=True)
class Trial:
    """One trial of the drop search."""

    kept: int
    score: float
    drop: float


def search_drop(session: Session, *, most_trials: int = TRIALS) -> tuple[Run, list[Trial]]:
    """Find the fewest weights whose score stays within the budget's drop.

    The search bisects log(kept). Every trial prunes anew with one allocation round. The result is
    the smallest network that was tried and passed. If none did, only the weights that
    `keep_at_most` forces out are removed.

    Args:
        session: what all runs share; its target is a `Budget` with `drop` and `evaluate`.
        most_trials: number of trials at most.
    """
    budget = session.options.target
    assert isinstance(budget, Budget)
    assert budget.drop is not None
    assert budget.evaluate is not None
    dense = _dense_score(session, budget.evaluate)
    total = sum(session.prunable.values())
    limits = [removable(budget, name, n) for name, n in session.prunable.items()]
    forced, most = (sum(part) for part in zip(*limits, strict=True))
    low, high = math.log(max(1, total // 1000, total - most)), math.log(max(1, total - forced))
    trials: list[Trial] = []
    best: Run | None = None
    with track("trials", most_trials) as advance:
        while not trials or (len(trials) < most_trials and high - low >= math.log(_CLOSE)):
            middle = (low + high) / 2 if trials else max(low, high + math.log(_FIRST_KEPT))
            kept = min(max(1, total - most, round(math.exp(middle))), total - forced)
            run = start_run(session, session.allocated(budget, total - kept))
            score = _score(budget.evaluate, run.model, session.store, f"run {run.number} score")
            run.comparison = None  # the user's function may have changed the network
            trials.append(Trial(kept, score, dense - score))
            if dense - score <= budget.drop:
                best, high = run, math.log(kept)
            else:
                low = math.log(kept)
            advance(1)
    _warn_of_an_error_rate(trials, dense, total)
    if best is None:
        _warn_of_failure(trials, budget.drop, dense, total)
        best = start_run(session, session.allocated(budget, forced))
    return best, trials


def _warn_of_failure(trials: list[Trial], drop: float, dense: float, total: int) -> None:
    nearest = min(trials, key=lambda trial: trial.drop)
    caution(
        f"none of {len(trials)} trials stayed within {drop:g} of the dense score {dense:.4g}: the "
        f"best lost {nearest.drop:.4g} with {nearest.kept:,} of {total:,} weights. Only the "
        "weights that limits force out were removed: allow more, or use more data."
    )


def _warn_of_an_error_rate(trials: list[Trial], dense: float, total: int) -> None:
    """Warn where nearly nothing is kept and the score has risen: it is probably an error rate."""
    least = min(trials, key=lambda trial: trial.kept)
    if least.score > dense and least.kept <= _NEARLY_NOTHING * total:
        caution(
            f"with {least.kept:,} of {total:,} weights evaluate gives {least.score:.4g}, with all "
            f"of them {dense:.4g}. A score must be larger for better networks; to use an error, "
            "return its negative."
        )


def _dense_score(session: Session, evaluate: Evaluate) -> float:
    """Score the dense network, also in a resumed run: a fingerprint says little of a function."""
    key, score = "dense score", score_of(evaluate, session.model)
    saved = session.store.read(key)
    if saved is None:
        session.store.write(key, {}, {"score": score})
    elif saved.record["score"] != score:
        raise LobsError(
            f"evaluate gives the dense network {score:.6g}, but gave {saved.record['score']:.6g} "
            "when the run began: it has changed or is random. Use the same one, or another folder."
        )
    return score


def _score(evaluate: Evaluate, model: nn.Module, run_store: RunStore, key: str) -> float:
    saved = run_store.read(key)
    if saved is not None:
        return float(saved.record["score"])
    score = score_of(evaluate, model)
    run_store.write(key, {}, {"score": score})
    return score


def score_of(evaluate: Evaluate, model: nn.Module) -> float:
    """Return the score that the first process's function gives a network, on all processes."""
    score = 0.0
    with process_group().raise_together():
        if process_group().leads:
            # A function that forgets eval mode would train batch norms.
            with user_code("evaluate"), evaluating(model):
                value = evaluate(model)
            try:
                score = float(value)
            except (TypeError, ValueError, OverflowError):
                raise LobsError(
                    f"evaluate returned {clipped(value)}; it must return a number, larger is better."
                ) from None
            if math.isnan(score):
                raise LobsError("evaluate returned NaN; it must return a number, larger is better.")
    return float(process_group().all_gather(score)[0])
