"""The solver to use when you do not want to choose one: a good support by alternating directions, then swaps.

Alternating directions take as many matrix products of rows·d² as they take steps, and in the right
units end below the exact greedy, which costs rows·d³/3 multiply-adds; swaps bring either below
both, and for about as long as rivals take in all. On tiny layers, where a start is a matter of
chance, both are run; and where swaps find far more than they should, because columns that replace
each other have misled the start, others are tried too. For a limit on the error instead of a count
the exact greedy is preferred where it is affordable: it knows the error at every count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.solvers.admm import ADMM, first_independence
from lobs.solvers.baselines import Scored
from lobs.solvers.column_sweep import ColumnSweep
from lobs.solvers.greedy import GreedyOBS
from lobs.solvers.layerwise_obs import LOBS, PRODUCTS
from lobs.solvers.least_squares import on_support, single_precision, weighted_error
from lobs.solvers.local_search import round_work, swap
from lobs.solvers.patterns.nbym import GREEDY_UP_TO, SWAPS_UP_TO
from lobs.solvers.patterns.nbym_admm import STEPS
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.refine import Refine
from lobs.solvers.solution import Solution
from lobs.targets import Block, NByM, Sparsity, Structured, Target

# Seconds per 10⁹ multiply-adds on two cores, fitted by `python -m benchmarks.rivals --costs`; only
# their ratios matter here.
_EXACT = 0.024
PRODUCT = 0.021
_FACTOR = 0.030
_BLOCKS = 0.25
_GROUP_SWAPS = 3  # times what the exact greedy takes on the same layer (`benchmarks.patterns`)
# A support and its swaps may take about as long as rivals: a decomposition, so long per 10⁹ d³, and
# so many products of rows·d² (`benchmarks.rivals`).
_DECOMPOSITION, _PRODUCTS = 0.1, 60
# More rounds find next to nothing; and rounds of so few seconds are not counted.
_MOST, _SOON = 3, 0.02
# What one round of swaps wins is worth more than that time, but not so many times as much.
_DEAREST = 2.5
# Below this share of a layer's energy float32 takes rounding for gains; then the start is solved
# too, and the better counts.
_BLIND = 1e-5
# Multiply-adds of one step below which a layer is tiny.
_TINY = 1e6
# Where more than this share is kept swaps take longest, and they end as low from a support that has
# not finished yet, two penalties earlier (`benchmarks.sketch`); where their rounds are not counted
# there is nothing to save.
_SKETCH, _MUCH = ADMM(penalties=5), 0.2
# Columns that replace each other mislead alternating directions, which drop them together. A layer
# has them where so large a share of its columns is so little independent; and where a first round
# of swaps, which takes some hundredths off the error, takes off more than a tenth (of few weights
# kept it does that anyway). Looked for up to so many columns.
_REPLACED, _DEPENDENT, _WIDEST = 0.1, 0.01, 4096
_POOR, _SPARSE = 0.1, 0.08
# Such layers are worth so many times rivals' time, and so many seconds, for each of two other
# starts; not if nothing is lost.
_RESCUE, _LONGEST, _NOTHING = 10, 60.0, 1e-9


@dataclass(frozen=True)
class Auto:
    """Alternating directions, then swaps; tiny layers also from the exact greedy's support.

    Where columns replace each other, and so mislead that start, units of equal energy are tried too
    and, where it takes no more than ten times as long as rivals, the exact greedy. The error, on Ψ
    + λI where Ψ is damped, is never above that of a start it ran. Deterministic unless `seconds`
    cuts the swaps short, which also leaves other starts out. Very wide layers that keep much go
    without swaps; where a limit of memory leaves no room, `ColumnSweep`. By ε the start is the
    exact greedy where that costs no more than `patience` times alternating directions. Patterns go
    to the solvers made for them, which weigh their costs themselves.
    """

    patience: float = 2.0
    seconds: float | None = None
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve; see the class."""
        match target:
            case NByM() | Block() | Structured():
                return GreedyOBS()(problem, target)
        if not isinstance(target, Sparsity):
            return Refine(self.start(problem), seconds=self.seconds)(problem, target)
        count = target.count(problem.prunable)
        if not memory.affords(ADMM.bytes(*problem.weight.shape[-2:])):
            return ColumnSweep()(problem, target)
        kept = problem.weight.numel() - count
        share, hard = kept / max(1, problem.weight.numel()), _replaceable(problem, count)
        quick = (
            share > _MUCH and not hard and self.seconds is None and _round(problem, kept) > _SOON
        )
        start = _SKETCH if quick else ADMM()
        greedy, directions = costs(problem, start)
        turns = _rounds(problem, kept, directions)
        found, gained = self._from_support(
            problem, turns, *(start if turns else ADMM()).support(problem, count)
        )
        if self.seconds is None and _agreed(
            hard or (share > _SPARSE and gained > _POOR * _weighted(problem, found))
        ):
            others = (
                self._rescues(problem, count)
                if _agreed(found.error > _NOTHING * found.energy)
                else []
            )
        elif problem.weight.numel() * problem.weight.shape[-1] <= _TINY:
            others = [
                self._from_support(
                    problem,
                    _rounds(problem, kept, greedy),
                    GreedyOBS().path(problem).mask_at(count),
                )[0]
            ]
        else:
            others = []
        return _best(problem, [found, *others])

    def start(self, problem: Problem) -> GreedyOBS | ADMM | ColumnSweep:
        """Which solver finds the first support where the count is not known."""
        greedy, directions = costs(problem)
        if greedy <= self.patience * directions or (
            _affordable(problem) and _replaceable(problem, problem.prunable // 2)
        ):
            return GreedyOBS()
        return ADMM() if memory.affords(ADMM.bytes(*problem.weight.shape[-2:])) else ColumnSweep()

    def _rescues(self, problem: Problem, count: int) -> list[Solution]:
        """Solutions from other starts: units of equal energy, and the exact greedy's support where it can be afforded."""
        turns = _rounds(problem, problem.weight.numel() - count, 0.0, patience=_RESCUE)
        found = [
            self._from_support(problem, turns, *ADMM(units="energy").support(problem, count))[0]
        ]
        if _affordable(problem):
            mask = GreedyOBS().path(problem).mask_at(count)
            # Digits that the swaps lack on such layers may make them worse.
            found += [self._from_support(problem, turns, mask)[0], on_support(problem, mask)]
        return found

    def _from_support(
        self, problem: Problem, turns: int, mask: Tensor, near: Tensor | None = None
    ) -> tuple[Solution, float]:
        """Swap at once, for so many rounds: least squares on the first support would cost as much as one of them.

        Beside it, what the first round took off the weighted error.
        """
        if not turns:
            return on_support(problem, mask, near), 0.0
        done = swap(problem, mask, near, rounds=turns, seconds=self.seconds)
        found = on_support(problem, done.mask, done.values)
        if _agreed(found.error <= _BLIND * found.energy):
            found = _best(problem, [found, on_support(problem, mask)])
        return found, done.gained


def _agreed(opinion: bool) -> bool:
    """The first process's opinion: a tie may fall differently on another kind of processor, and all must go the same way."""
    return bool(process_group().all_gather(opinion)[0])


def _best(problem: Problem, found: list[Solution]) -> Solution:
    """The solution of least weighted error."""
    if len(found) == 1:
        return found[0]
    errors = [_weighted(problem, solution) for solution in found]
    return found[int(process_group().all_gather(errors.index(min(errors)))[0])]


def _weighted(problem: Problem, found: Solution) -> float:
    return found.error if problem.row_weight is None else weighted_error(problem, found.weight)


def _replaceable(problem: Problem, count: int) -> bool:
    """Has the layer many columns that others nearly replace?"""
    if not problem.weight.numel() or problem.weight.shape[-1] > _WIDEST:
        return False
    return _agreed(
        float((first_independence(problem, count) < _DEPENDENT).double().mean()) > _REPLACED
    )


def _affordable(problem: Problem) -> bool:
    """Is there time and room for the exact greedy where another start may be poor?"""
    seconds = costs(problem)[0]
    room = memory.affords(GreedyOBS.bytes(*problem.weight.shape[-2:]))
    return _agreed(seconds <= min(_LONGEST, _RESCUE * _rivals(problem)) and room)


def _rivals(problem: Problem) -> float:
    """About how many seconds rivals take."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    return (_DECOMPOSITION * len(problem.groups) * d**3 + PRODUCT * _PRODUCTS * rows * d**2) / 1e9


def _rounds(problem: Problem, kept: int, spent: float, patience: float = 1.0) -> int:
    """How many rounds of swaps there is time for after a first support, when rivals' time is all there is; mostly one."""
    theirs, one = patience * _rivals(problem), _round(problem, kept)
    if one <= _SOON:
        return _MOST
    return 0 if one > _DEAREST * theirs else max(1, min(_MOST, int((theirs - spent) / one)))


def _round(problem: Problem, kept: int) -> float:
    """About how many seconds one round of swaps takes."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    pairs = zip(problem.metrics, problem.groups, strict=True)
    digits = 1 if all(single_precision(metric, weight) for metric, (weight, _) in pairs) else 2
    return digits * PRODUCT * rows * round_work(kept / max(1, rows), d - problem.protected) / 1e9


def seconds_of(
    solver: Solver, groups: int, rows: int, d: int, target: Target | None = None
) -> float:
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
        case GreedyOBS(), _:
            return greedy
        case LOBS(), _:
            return (_FACTOR * groups * d**3 + PRODUCT * PRODUCTS * rows * d**2) / 1e9
        case ADMM(), _:
            return _directions(solver, groups, rows, d)
        case ColumnSweep(steps=steps), _:
            return (_FACTOR * groups * d**3 * 4 / 3 + PRODUCT * (1 + steps) * rows * d**2) / 1e9
    if not memory.affords(ADMM.bytes(rows // groups, d)):
        return seconds_of(ColumnSweep(), groups, rows, d)
    return 2 * _directions(ADMM(), groups, rows, d)  # with swaps and least squares


def costs(problem: Problem, directions: ADMM = ADMM()) -> tuple[float, float]:  # noqa: B008 - frozen
    """Estimated seconds of (exact greedy, alternating directions) on two cores, without what both share."""
    shape = len(problem.groups), problem.weight[..., 0].numel(), problem.weight.shape[-1]
    return _greedy(*shape[1:]), _directions(directions, *shape)


def _greedy(rows: int, d: int) -> float:
    return _EXACT * rows * d**3 / 3e9


def _directions(admm: ADMM, groups: int, rows: int, d: int) -> float:
    return admm.penalties * (_FACTOR * groups * d**3 / 2 + PRODUCT * admm.steps * rows * d**2) / 1e9
