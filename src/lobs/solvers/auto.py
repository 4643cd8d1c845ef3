"""The solver to use when you do not want to choose one: a good support by alternating directions, then swaps.

Alternating directions take as many matrix products of rows·d² as they take steps, and in the right units end below the exact
greedy, which costs rows·d³/3 multiply-adds; swaps bring either below both, and for about as long as rivals take in all. On
tiny layers, where a start is a matter of chance, both are run. For a limit on the error instead of a count the exact greedy is
preferred where it is affordable: it knows the error at every count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lobs import memory
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


@dataclass(frozen=True)
class Auto:
    """Alternating directions, then swaps; tiny layers also from the exact greedy's support.

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
        found = self._from_support(problem, costs(problem)[1], *ADMM().support(problem, count))
        if problem.weight.numel() * problem.weight.shape[-1] > _TINY:
            return found
        other = self._from_support(problem, costs(problem)[0], Exact().path(problem).mask_at(count))
        return min(found, other, key=lambda solution: weighted_error(problem, solution.weight))

    def start(self, problem: Problem) -> Exact | ADMM | Columns:
        """Which solver finds the first support where the count is not known."""
        greedy, directions = costs(problem)
        if greedy <= self.patience * directions:
            return Exact()
        return ADMM() if memory.affords(ADMM.bytes(*problem.weight.shape[-2:])) else Columns()

    def _from_support(self, problem: Problem, spent: float, mask: Tensor, near: Tensor | None = None) -> Solution:
        """Swap at once: least squares on the first support would cost as much as a round of swaps."""
        turns = _rounds(problem, int(mask.sum()), spent)
        if not turns:
            return on_support(problem, mask, near)
        found = on_support(problem, *swap(problem, mask, near, rounds=turns, seconds=self.seconds))
        if found.error > _BLIND * found.energy:
            return found
        return min(found, on_support(problem, mask), key=lambda solution: solution.error)


def _rounds(problem: Problem, kept: int, spent: float) -> int:
    """How many rounds of swaps there is time for after a first support, when rivals' time is all there is; mostly one."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    theirs = (_DECOMPOSITION * len(problem.groups) * d**3 + PRODUCT * _PRODUCTS * rows * d**2) / 1e9
    one = _round(problem, kept)
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
    greedy, directions = costs_of(groups, rows, d)
    match solver, target:
        case Scored(), _:
            return 0.0
        case _, NByM():
            work = rows // groups * d**3
            first = directions * STEPS / ADMM().steps
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
            return directions
        case Columns(steps=steps), _:
            return (_FACTOR * groups * d**3 * 4 / 3 + PRODUCT * (1 + steps) * rows * d**2) / 1e9
    if not memory.affords(ADMM.bytes(rows // groups, d)):
        return seconds_of(Columns(), groups, rows, d)
    return 2 * directions  # with swaps and least squares


def costs(problem: Problem) -> tuple[float, float]:
    """Estimated seconds of (exact greedy, alternating directions) on two cores, without what both share."""
    return costs_of(len(problem.groups), problem.weight[..., 0].numel(), problem.weight.shape[-1])


def costs_of(groups: int, rows: int, d: int) -> tuple[float, float]:
    """The same for a shape: rows of all groups, and columns."""
    admm = ADMM()
    directions = admm.penalties * (_FACTOR * groups * d**3 / 2 + PRODUCT * admm.steps * rows * d**2)
    return _EXACT * rows * d**3 / 3e9, directions / 1e9
