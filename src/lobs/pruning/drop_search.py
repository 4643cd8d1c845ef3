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
from lobs.calibration.forward import batch_size, evaluating
from lobs.calibration.kept_back import CHOOSING, ROUND
from lobs.certificate.guarantee import CONFIDENCE, measured, tightest
from lobs.errors import LobsError, TargetError, caution, clipped
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
    at_most: float | None = None  # upper confidence limit of the drop, where it was estimated

    @property
    def limit(self) -> float:
        """Return what must be within the budget: the upper confidence limit, or the drop."""
        return self.drop if self.at_most is None else self.at_most


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
    judge = _judge(session, budget, most_trials)
    dense = judge.dense
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
            trial = judge.trial(run, kept)
            run.comparison = None  # the user's function may have changed the network
            trials.append(trial)
            if trial.limit <= budget.drop:
                best, high = run, math.log(kept)
            else:
                low = math.log(kept)
            advance(1)
    _warn_of_an_error_rate(trials, dense, total)
    if best is None:
        _warn_of_failure(trials, budget.drop, dense, total)
        best = start_run(session, session.allocated(budget, forced))
    return best, trials


class _ByScore:
    """Judge networks by the user's own score."""

    def __init__(self, session: Session, evaluate: Evaluate) -> None:
        self.session, self.evaluate = session, evaluate
        self.dense = _dense_score(session, evaluate)

    def trial(self, run: Run, kept: int) -> Trial:
        """Return what the user's function says of a run."""
        key = f"run {run.number} score"
        score = _score(self.evaluate, run.model, self.session.store, key)
        return Trial(kept, score, self.dense - score)


class _WithoutLabels:
    """Judge networks by the accuracy they are expected to lose, on inputs that prune none of them.

    A changed answer costs the dense network's confidence in the old answer over the new one. Every
    trial may err, so each limit is stricter: together they hold with 95 % confidence.
    """

    dense = 1.0

    def __init__(self, session: Session, drop: float, most_trials: int) -> None:
        self.session, self.level = session, 1 - (1 - CONFIDENCE) / most_trials
        assert session.choosing is not None
        samples = sum(map(batch_size, session.choosing))
        samples = round(process_group().sum_numbers(samples)[0])
        if tightest(samples, self.level) > drop:
            enough = math.log(1 - self.level) / math.log1p(-drop)
            share = ROUND / len(CHOOSING)
            raise TargetError(
                f"{samples:,} kept-back inputs cannot show a drop of at most {drop:.3g}: give "
                f"batches of at least {enough * share:,.0f} inputs, allow a larger drop, or give "
                "evaluate=…."
            )

    def trial(self, run: Run, kept: int) -> Trial:
        """Return the accuracy that a run is expected to keep, and the limit on what it loses."""
        store, key = self.session.store, f"run {run.number} expected drop"
        saved = store.read(key)
        if saved is None:
            assert self.session.choosing is not None
            tally = measured(self.session.model, run.model, self.session.choosing, "score")
            if not tally.finite:
                raise TargetError(
                    "the network's outputs have no row for each sample, so a drop cannot be "
                    "estimated: give Budget(drop=…, evaluate=…)."
                )
            lost, at_most = tally.drop(self.level)
            store.write(key, {}, {"lost": lost, "at_most": at_most})
        else:
            lost, at_most = saved.record["lost"], saved.record["at_most"]
        return Trial(kept, 1 - lost, lost, at_most)


def _judge(session: Session, budget: Budget, most_trials: int) -> _ByScore | _WithoutLabels:
    assert budget.drop is not None
    if budget.evaluate is None:
        return _WithoutLabels(session, budget.drop, most_trials)
    return _ByScore(session, budget.evaluate)


def _warn_of_failure(trials: list[Trial], drop: float, dense: float, total: int) -> None:
    nearest = min(trials, key=lambda trial: trial.limit)
    lost = f"{nearest.limit:.4g}"
    if nearest.at_most is not None:
        lost = f"up to {lost} (upper confidence limit; estimate {nearest.drop:.4g})"
    caution(
        f"none of {len(trials)} trials stayed within {drop:g} of the dense score {dense:.4g}: the "
        f"best lost {lost} with {nearest.kept:,} of {total:,} weights. Only the weights that "
        "limits force out were removed: allow more, or use more data."
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
                    f"evaluate returned {clipped(value)}; it must return a number, larger is "
                    "better."
                ) from None
            if math.isnan(score):
                raise LobsError("evaluate returned NaN; it must return a number, larger is better.")
    return float(process_group().all_gather(score)[0])
