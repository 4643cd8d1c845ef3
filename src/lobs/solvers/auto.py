"""The solver to use when you do not want to choose one: a good support by alternating directions, then swaps.

Alternating directions take as many matrix products of rows·d² as they take steps, and in the right units end below the exact
greedy, which costs rows·d³/3 multiply-adds; swaps bring either below both, and for about as long as rivals take in all. On
tiny layers, where a start is a matter of chance, both are run; and where swaps find far more than they should, because columns
that replace each other have misled the start, others are tried too. For a limit on the error instead of a count the exact
greedy is preferred where it is affordable: it knows the error at every count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lobs import memory
from lobs.distributed import crew
from lobs.problem import Problem, Solver
from lobs.solution import Solution
from lobs.solvers.admm import ADMM
from lobs.solvers.columns import Columns
from lobs.solvers.exact import Exact
from lobs.solvers.lobs import LOBS, PRODUCTS
from lobs.solvers.nbym import GREEDY_UP_TO, SWAPS_UP_TO
from lobs.solvers.nbym_admm import STEPS
from lobs.solvers.refine import Refine
from lobs.solvers.scored import Scored
from lobs.solvers.search import round_work, swap
from lobs.solvers.support import on_support, single_precision, weighted_error
from lobs.targets import Block, NByM, Sparsity, Structured, Target

# Seconds per 10⁹ multiply-adds on two cores, fitted by `python -m benchmarks.rivals --costs`; only their ratios matter here.
_EXACT = 0.024
PRODUCT = 0.021
_FACTOR = 0.030
_BLOCKS = 0.25
_GROUP_SWAPS = 3  # times what the exact greedy takes on the same layer (`benchmarks.patterns`)
# A support and its swaps may take about as long as rivals: a decomposition, so long per 10⁹ d³, and so many products of rows·d²
# (`benchmarks.rivals`).
_DECOMPOSITION, _PRODUCTS = 0.1, 60
# More rounds find next to nothing; and rounds of so few seconds are not counted.
_MOST, _SOON = 3, 0.02
# What one round of swaps wins is worth more than that time, but not so many times as much.
_DEAREST = 2.5
# Below this share of a layer's energy float32 takes rounding for gains; then the start is solved too, and the better counts.
_BLIND = 1e-5
# Multiply-adds of one step below which a layer is tiny.
_TINY = 1e6
# Where more than this share is kept swaps take longest, and they end as low from a support that has not settled yet, two
# penalties earlier (`benchmarks.sketch`); where their rounds are not counted there is nothing to save.
_SKETCH, _MUCH = ADMM(penalties=5), 0.2
# A first round of swaps takes some hundredths off the error. Where it takes off more than this share of it the start was poor:
# columns replace each other, and alternating directions drop them together. With few weights kept it takes more off any start.
_POOR, _FEW = 0.1, 0.08
# Such layers are worth so many times rivals' time for the exact greedy's support too.
_RESCUE = 10


@dataclass(frozen=True)
class Auto:
    """Alternating directions, then swaps; tiny layers, and those whose start was poor, also from the exact greedy's support.

    Its error, on Ψ + λI where Ψ is damped, is never above that of any start it ran. Deterministic unless `seconds` cuts the
    swaps short. Very wide layers that keep much go without swaps; where a limit of memory leaves no room, `Columns`. By ε the
    start is the exact greedy where that costs no more than `patience` times alternating directions. Patterns go to the solvers
    made for them, which weigh their costs themselves.
    """

    patience: float = 2.0
    seconds: float | None = None
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        match target:
            case NByM() | Block() | Structured():
                return Exact()(problem, target)
        if not isinstance(target, Sparsity):
            return Refine(self.start(problem), seconds=self.seconds)(problem, target)
        count = target.count(problem.prunable)
        if not memory.affords(ADMM.bytes(*problem.weight.shape[-2:])):
            return Columns()(problem, target)
        kept = problem.weight.numel() - count
        share = kept / max(1, problem.weight.numel())
        start = _SKETCH if share > _MUCH and self.seconds is None and _round(problem, kept) > _SOON else ADMM()
        greedy, directions = costs(problem, start)
        turns = _rounds(problem, kept, directions)
        found, gained = self._from_support(problem, turns, *(start if turns else ADMM()).support(problem, count))
        poor = self.seconds is None and share > _FEW and gained > _POOR * found.error
        if crew().hear(poor)[0]:  # all processes go the same way
            others = self._rescues(problem, count)
        elif problem.weight.numel() * problem.weight.shape[-1] <= _TINY:
            others = [self._from_support(problem, _rounds(problem, kept, greedy), Exact().path(problem).mask_at(count))[0]]
        else:
            return found
        return min(found, *others, key=lambda solution: weighted_error(problem, solution.weight))

    def start(self, problem: Problem) -> Exact | ADMM | Columns:
        """Which solver finds the first support where the count is not known."""
        greedy, directions = costs(problem)
        if greedy <= self.patience * directions:
            return Exact()
        return ADMM() if memory.affords(ADMM.bytes(*problem.weight.shape[-2:])) else Columns()

    def _rescues(self, problem: Problem, count: int) -> list[Solution]:
        """Solutions from other starts: units of equal energy, and the exact greedy's support where it can be afforded."""
        found = [self._from_support(problem, _MOST, *ADMM(units="energy").support(problem, count))[0]]
        if costs(problem)[0] <= _RESCUE * _rivals(problem) and memory.affords(Exact.bytes(*problem.weight.shape[-2:])):
            found.append(self._from_support(problem, _MOST, Exact().path(problem).mask_at(count))[0])
        return found

    def _from_support(self, problem: Problem, turns: int, mask: Tensor, near: Tensor | None = None) -> tuple[Solution, float]:
        """Swap at once, for so many rounds: least squares on the first support would cost as much as one of them.

        Beside it, what the first round took off the error.
        """
        if not turns:
            return on_support(problem, mask, near), 0.0
        done = swap(problem, mask, near, rounds=turns, seconds=self.seconds)
        found = on_support(problem, done.mask, done.values)
        if found.error <= _BLIND * found.energy:
            found = min(found, on_support(problem, mask), key=lambda solution: solution.error)
        return found, done.gained


def _rivals(problem: Problem) -> float:
    """About how many seconds rivals take."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    return (_DECOMPOSITION * len(problem.groups) * d**3 + PRODUCT * _PRODUCTS * rows * d**2) / 1e9


def _rounds(problem: Problem, kept: int, spent: float) -> int:
    """How many rounds of swaps there is time for after a first support, when rivals' time is all there is; mostly one."""
    theirs, one = _rivals(problem), _round(problem, kept)
    if one <= _SOON:
        return _MOST
    return 0 if one > _DEAREST * theirs else max(1, min(_MOST, int((theirs - spent) / one)))


def _round(problem: Problem, kept: int) -> float:
    """About how many seconds one round of swaps takes."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    pairs = zip(problem.metrics, problem.groups, strict=True)
    digits = 1 if all(single_precision(metric, weight) for metric, (weight, _) in pairs) else 2
    return digits * PRODUCT * rows * round_work(kept / max(1, rows), d - problem.protected) / 1e9


def seconds_of(solver: Solver, groups: int, rows: int, d: int, target: Target | None = None) -> float:
    """About how long a solver takes on a layer of so many rows in all; what is not known is taken for `Auto`."""
    greedy = _greedy(rows, d)
    match solver, target:
        case Scored(), _:
            return 0.0
        case _, NByM():
            work = rows // groups * d**3
            first = _directions(ADMM(steps=STEPS), groups, rows, d)
            return first + greedy * ((work <= GREEDY_UP_TO) + _GROUP_SWAPS * (work <= SWAPS_UP_TO))
        case _, Block(shape=(high, _)):
            return _BLOCKS * groups * -(-rows // groups // high) * d**3 / 2e9
        case _, Structured(what=what):
            return _BLOCKS * groups * d**3 / 2e9 if what == "inputs" else 0.0
        case Exact(), _:
            return greedy
        case LOBS(), _:
            return (_FACTOR * groups * d**3 + PRODUCT * PRODUCTS * rows * d**2) / 1e9
        case ADMM(), _:
            return _directions(solver, groups, rows, d)
        case Columns(steps=steps), _:
            return (_FACTOR * groups * d**3 * 4 / 3 + PRODUCT * (1 + steps) * rows * d**2) / 1e9
    if not memory.affords(ADMM.bytes(rows // groups, d)):
        return seconds_of(Columns(), groups, rows, d)
    return 2 * _directions(ADMM(), groups, rows, d)  # with swaps and least squares


def costs(problem: Problem, directions: ADMM = ADMM()) -> tuple[float, float]:  # noqa: B008 - frozen
    """Estimated seconds of (exact greedy, alternating directions) on two cores, without what both share."""
    shape = len(problem.groups), problem.weight[..., 0].numel(), problem.weight.shape[-1]
    return _greedy(*shape[1:]), _directions(directions, *shape)


def _greedy(rows: int, d: int) -> float:
    return _EXACT * rows * d**3 / 3e9


def _directions(admm: ADMM, groups: int, rows: int, d: int) -> float:
    return admm.penalties * (_FACTOR * groups * d**3 / 2 + PRODUCT * admm.steps * rows * d**2) / 1e9
