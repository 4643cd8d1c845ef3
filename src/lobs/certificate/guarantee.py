"""A statistical guarantee for any network, from inputs that had no part in choosing its weights.

Of n such inputs k changed their answer. With 95 % confidence at most a share p of all inputs drawn
like these does: p is the exact Clopper–Pearson limit. Means of numbers between 0 and 1 are bounded
by the Chernoff–Hoeffding inequality. Both hold for every n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.comparison import side_by_side
from lobs.calibration.forward import batch_size, call, main_output

CONFIDENCE = 0.95
LEAST_COST = 0.25  # of a changed answer: probabilities that are too even would make changes free
_HALVINGS = 200  # of an interval: double precision ends earlier


@dataclass(frozen=True)
class Guarantee:
    """What is known of all inputs, from some that were kept back.

    Attributes:
        samples: inputs that were kept back to certify.
        confidence: how often such a statement is right, at least.
        answers: whether answers were compared: the top class, or the next token.
        changed: share of these inputs' answers that changed; 0 where there are no answers.
        changes_at_most: limit on that share, for all inputs drawn like these.
        error: mean relative change of the output; a change counts 1 at most.
        error_at_most: limit on that mean.
        divergence: mean Kullback–Leibler divergence of the answers, in nats, on these inputs.
        whole: whether every input has one answer, so that the limit is exact.
    """

    samples: int
    confidence: float
    answers: bool
    changed: float
    changes_at_most: float | None
    error: float
    error_at_most: float
    divergence: float | None = None
    whole: bool = True

    @property
    def at_most(self) -> float:
        """Return the limit on what counts: changed answers, or else the output's change."""
        return self.error_at_most if self.changes_at_most is None else self.changes_at_most

    @property
    def measured(self) -> float:
        """Return what `at_most` limits, on these inputs."""
        return self.changed if self.answers else self.error

    def __str__(self) -> str:
        return f"{self.claim}, {self.scope}"

    @property
    def claim(self) -> str:
        """Return what holds, as the beginning of a sentence."""
        limit = f"{math.ceil(10_000 * self.at_most) / 100:.2f} %"  # a limit is rounded up
        if self.answers:
            return f"At most {limit} of answers change"
        return f"The output changes by at most {limit} of its norm on average"

    @property
    def scope(self) -> str:
        """Return for which inputs it holds, and how surely."""
        return (
            f"with {100 * self.confidence:.3g} % confidence, for inputs like the "
            f"{self.samples:,} kept back ({100 * self.measured:.2f} % there)"
        )


def clopper_pearson(changed: int, samples: int, confidence: float = CONFIDENCE) -> float:
    """Return the exact upper limit on a probability after `changed` hits in `samples` trials.

    It is the largest p for which at most so few hits have a probability of 1 − confidence.

    >>> round(clopper_pearson(0, 299), 4)
    0.01
    """
    if samples <= 0 or changed >= samples:
        return 1.0
    return _largest(lambda p: _log_tail(changed, samples, p) >= math.log1p(-confidence), samples)


def chernoff_hoeffding(mean: float, samples: int, confidence: float = CONFIDENCE) -> float:
    """Return an upper limit on the mean of numbers between 0 and 1, of which `mean` was measured.

    It solves n · KL(mean ‖ p) = log(1 / (1 − confidence)).
    """
    if samples <= 0 or mean >= 1:
        return 1.0
    most = -math.log1p(-confidence) / samples
    return max(mean, _largest(lambda p: p <= mean or _divergence(mean, p) <= most, samples))


def _largest(holds: Callable[[float], bool], samples: int) -> float:
    """Return the largest p in (0, 1) for which a condition holds, rounded up: by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    # The tail is a sum of rounded terms. This margin is far above their error.
    return min(1.0, high * (1 + 1e-12 * max(1.0, math.sqrt(samples))))


def _log_tail(hits: int, trials: int, p: float) -> float:
    """Return the logarithm of the probability of at most `hits` hits, summed from the largest."""
    if p <= 0:
        return 0.0
    if p >= 1:
        return -math.inf
    if hits > trials * p:  # the upper tail is shorter and loses no digits
        rest = _log_sum(hits + 1, trials, trials, p, up=True)
        return math.log1p(-math.exp(rest)) if rest < 0 else -math.inf
    return _log_sum(0, hits, trials, p, up=False)


def _log_sum(first: int, last: int, trials: int, p: float, *, up: bool) -> float:
    """Return the logarithm of the binomial probabilities from `first` to `last` hits."""
    start = first if up else last
    log_start = (
        math.lgamma(trials + 1) - math.lgamma(start + 1) - math.lgamma(trials - start + 1)
        + start * math.log(p) + (trials - start) * math.log1p(-p)
    )  # fmt: skip
    odds, term, total = p / (1 - p), 1.0, 1.0
    for hits in range(start, last) if up else range(start, first, -1):
        term *= (trials - hits) / (hits + 1) * odds if up else hits / (trials - hits + 1) / odds
        total += term
        if term < 1e-18 * total:
            break
    return log_start + math.log(total)


def _divergence(q: float, p: float) -> float:
    if p >= 1:
        return math.inf
    rest = (1 - q) * math.log((1 - q) / (1 - p))
    return rest + (q * math.log(q / p) if q > 0 else 0.0)


def _without(out: Tensor, counted: Tensor | None) -> Tensor:
    """Return an output in double precision, with zeros where a position is padding."""
    out = out.detach().to(torch.float64)
    if out.dim() < 3 or counted is None:
        return out
    return torch.where(counted.to(out.device, torch.bool).unsqueeze(-1), out, 0.0)


class Tally:
    """Sums over the inputs of one data set, of the outputs of two networks.

    The accuracy that a changed answer is expected to lose is the dense network's probability of the
    old answer less that of the new one. It needs no labels. It counts a quarter at least.
    """

    def __init__(self) -> None:
        self.samples, self.changed, self.error, self.divergence = 0, 0.0, 0.0, 0.0
        self.lost = 0.0
        self.finite = self.answers = self.whole = True

    def add(self, batch: Any, dense: Any, pruned: Any) -> None:
        """Add one batch and what the two networks answer."""
        count = batch_size(batch)
        first, second = main_output(dense), main_output(pruned)
        if first is None or second is None or first.shape != second.shape or len(first) != count:
            self.finite = False
            return
        self.samples += count
        counted = _counted(batch, first)
        x, y = (_without(t, counted).reshape(count, -1) for t in (first, second))
        moved = (x - y).square().sum(dim=1).sqrt()
        size = x.square().sum(dim=1).sqrt()
        relative = torch.where(moved == 0, 0.0, moved / size).nan_to_num(1.0, posinf=1.0)
        self.error += float(relative.clamp(max=1.0).sum())
        if is_answers(dense, first):
            self._add_answers(first, second, counted)
        else:
            self.answers = False

    def _add_answers(self, first: Tensor, second: Tensor, counted: Tensor | None) -> None:
        """Add the answers of one batch; `counted` is False where a token is padding."""
        logs = [t.detach().to(torch.float64).log_softmax(dim=-1) for t in (first, second)]
        other = (first.argmax(dim=-1) != second.argmax(dim=-1)).to(torch.float64)
        other = torch.where(second.isfinite().all(dim=-1), other, 1.0)
        divergence = (logs[0].exp() * (logs[0] - logs[1])).nan_to_num(0.0).sum(dim=-1)
        cost = _expected_loss(first, second) * other
        if first.dim() > 2:
            self.whole = False
            weight = torch.ones_like(other) if counted is None else counted.to(other)
            share = weight / weight.sum(dim=1, keepdim=True).clamp(min=1)
            other, divergence, cost = ((t * share).sum(dim=1) for t in (other, divergence, cost))
        self.changed += float(other.sum())
        self.lost += float(cost.sum())
        self.divergence += float(divergence.sum())

    def join(self) -> Tally:
        """Add up the sums of all processes."""
        numbers = process_group().sum_numbers(
            self.samples, self.changed, self.error, self.divergence, self.lost,
            not self.finite, not self.answers, not self.whole,
        )  # fmt: skip
        self.samples = round(numbers[0])
        self.changed, self.error, self.divergence, self.lost = numbers[1:5]
        self.finite, self.answers, self.whole = (n == 0 for n in numbers[5:])
        return self

    def drop(self, level: float) -> tuple[float, float]:
        """Return the accuracy that is expected to be lost, or the relative error, and its limit.

        Args:
            level: the confidence of the limit.
        """
        share = min(1.0, (self.lost if self.answers else self.error) / max(1, self.samples))
        return share, chernoff_hoeffding(share, self.samples, level)

    def guarantee(self, confidence: float = CONFIDENCE, level: float | None = None) -> Guarantee:
        """Return the guarantee that the sums give.

        Args:
            confidence: what the guarantee states.
            level: the confidence of each limit, where several are stated together.
        """
        n, level = max(1, self.samples), confidence if level is None else level
        share, error = self.changed / n, min(1.0, self.error / n)
        limit = None
        if self.answers and self.whole:
            limit = clopper_pearson(round(self.changed), self.samples, level)
        elif self.answers:
            limit = chernoff_hoeffding(min(1.0, share), self.samples, level)
        return Guarantee(
            samples=self.samples,
            confidence=confidence,
            answers=self.answers,
            changed=share if self.answers else 0.0,
            changes_at_most=limit,
            error=error,
            error_at_most=chernoff_hoeffding(error, self.samples, level),
            divergence=self.divergence / n if self.answers else None,
            whole=self.whole,
        )


def probabilities(output: Tensor) -> Tensor:
    """Return an output's rows as probabilities, also where it holds these rather than logits."""
    rows = output.detach().to(torch.float64)
    given = bool((rows >= 0).all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-3).all())
    return rows if given else rows.softmax(dim=-1)


def _expected_loss(first: Tensor, second: Tensor) -> Tensor:
    """Return the accuracy that each answer loses if it changed, by the dense probabilities."""
    p = probabilities(first)
    old, new = (p.gather(-1, t.argmax(dim=-1, keepdim=True)).squeeze(-1) for t in (first, second))
    cost = (old - new).nan_to_num(1.0).clamp(min=LEAST_COST, max=1.0)
    return torch.where(second.isfinite().all(dim=-1), cost, 1.0)


def is_answers(raw: Any, output: Tensor) -> bool:
    """Return whether an output chooses among classes: logits, or one row of several numbers."""
    named = isinstance(raw, Mapping) and "logits" in raw
    return output.shape[-1] > 1 and (output.dim() == 2 or (named and output.dim() == 3))


def _counted(batch: Any, output: Tensor) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    fits = isinstance(mask, Tensor) and mask.shape == output.shape[:2]
    return mask.to(output.device) != 0 if fits and isinstance(mask, Tensor) else None


def measured(
    dense: nn.Module, pruned: nn.Module, batches: Iterable[Any], label: str = "guarantee"
) -> Tally:
    """Run two networks on the same inputs and return the sums.

    Args:
        dense: the network as it was given.
        pruned: the other network.
        batches: inputs that had no part in choosing the weights.
        label: what the progress bar says.
    """
    tally = Tally()
    with side_by_side(dense, pruned, batches, label) as passing:
        for batch in passing:
            tally.add(batch, call(dense, batch), call(pruned, batch))
    return tally.join()


def tightest(samples: int, confidence: float = CONFIDENCE) -> float:
    """Return the limit that `samples` inputs give when none of their answers changes."""
    return clopper_pearson(0, samples, confidence)
