"""The solver to use when you do not want to choose one: a support by ADMM, then swaps.

ADMM takes as many matrix products of rows·d² as it takes steps. In the right units it ends below
the greedy, which costs rows·d³/3 multiply-adds. Swaps bring either below both, in about the time
that rival solvers take in all. Tiny layers, whose result depends much on the start, are solved from
both. Columns that replace each other mislead ADMM: then swaps gain far more than usual, and other
starts are tried too. For a limit on the error instead of a count, the greedy is preferred where it
is affordable: it knows the error at every count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from lobs.solvers.admm import ADMM, first_independence
from lobs.solvers.column_sweep import ColumnSweep
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.greedy import GreedyOBS
from lobs.solvers.least_squares import near_support, on_support, single_precision, weighted_error
from lobs.solvers.local_search import round_work, swap
from lobs.solvers.patterns import pattern_solver
from lobs.solvers.problem import Problem, Solver
from lobs.solvers.refine import Refine, search_seconds
from lobs.solvers.solution import Solution
from lobs.targets import Pattern, Sparsity, Target


@dataclass(frozen=True)
class AutoPolicy:
    """The thresholds by which `Auto` chooses.

    Args:
        rival_products: products of rows·d² that rival solvers take, beside a decomposition. A
            support and its swaps may take about as long (`benchmarks.rivals`).
        most_rounds: rounds of swaps, at most; more find next to nothing.
        free_round: seconds of a round below which rounds are not counted.
        dearest_round: largest cost of one round of swaps, in multiples of the rivals' time.
        blind: share of the layer's energy. With a smaller error float32 mistakes rounding for
            gains. Then the start is solved too, and the better counts.
        tiny: multiply-adds of one ADMM step below which a layer is also solved from the greedy.
        much_kept: kept share above which swaps take longest. They end as low from a support found
            with fewer penalties and steps (`benchmarks.sketch`).
        sketch_penalties: number of ADMM penalties for such a layer.
        sketch_steps: number of ADMM steps at each of these penalties.
        dependent: independence below which a column counts as replaceable by others.
        replaceable: share of replaceable columns from which a layer is hard.
        widest_checked: columns up to which replaceable ones are looked for.
        poor_gain: share of the error. A first round of swaps that gains more shows a poor start.
        sparse: kept share below which swaps gain that much anyway.
        rescue_time: time for other starts of a hard layer, in multiples of the rivals' time.
        rescue_seconds: seconds for the greedy as another start, at most.
        few_rows: rows up to which a wide layer is solved from the greedy alone.
        wide_columns: columns from which it counts as wide.
        lossless: share of the layer's energy. With a smaller error no other start is tried.
    """

    rival_products: int = 60
    most_rounds: int = 3
    free_round: float = 0.02
    dearest_round: float = 2.5
    blind: float = 1e-5
    tiny: float = 1e6
    much_kept: float = 0.2
    sketch_penalties: int = 5
    sketch_steps: int = 6
    dependent: float = 0.01
    replaceable: float = 0.1
    widest_checked: int = 4096
    poor_gain: float = 0.1
    sparse: float = 0.08
    rescue_time: float = 10
    rescue_seconds: float = 60.0
    few_rows: int = 4
    wide_columns: int = 512
    lossless: float = 1e-9


POLICY = AutoPolicy()


@dataclass(frozen=True)
class Auto:
    """ADMM, then swaps; tiny layers also from the greedy's support.

    Where columns replace each other and so mislead that start, units of equal energy are tried
    too. So is the greedy, where it takes no more than ten times as long as rival solvers. The
    error, on Ψ + λI where Ψ is damped, is never above that of a start it ran. Very wide layers that
    keep much go without swaps. Where a memory limit leaves no room, `ColumnSweep` solves the layer.
    Patterns go to their own solvers, but N:M to `ColumnSweep` where memory leaves no room.

    Args:
        patience: for an `ErrorBudget`, the greedy finds the first support where it takes no more
            than `patience` times as long as ADMM.
        swap_seconds: time after which no further swaps and no other starts are tried. None sets
            no limit, and then results repeat.
        swaps: exchange weights of the first support, and take the best weights on the last one.
            Where a whole block is refitted afterwards, both win nothing (`benchmarks.blocks`).
            N:M patterns then go without swaps in wide layers only.
        needs: optional `Problem` fields that must be present: none.
    """

    patience: float = 2.0
    swap_seconds: float | None = None
    swaps: bool = True
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    def seconds(self, shape: ProblemShape) -> float:
        """Estimate the time of the start, the swaps and least squares on two cores."""
        quick = not self.swaps and isinstance(shape.target, Sparsity)
        return ADMM().seconds(shape) if quick else search_seconds(shape)

    def before_refit(self) -> Auto:
        """Return the solver of layers whose block is refitted afterwards."""
        return replace(self, swaps=False)

    def bytes(self, shape: ProblemShape) -> int:
        """Estimate the memory of solving one layer, its moments included."""
        if shape.single_copy and not shape.context.affords(ADMM().search_bytes(shape)):
            return ColumnSweep().bytes(shape)
        return shape.solving_bytes

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Return the solution."""
        if isinstance(target, Pattern):
            short = not problem.context.affords(ADMM().search_bytes(problem.shape))
            solver = pattern_solver(target)
            if short and solver.column_choice is not None:
                return ColumnSweep()(problem, target)
            quick = None if self.swaps else solver.quick
            return (quick or solver.solve)(problem, target, "auto")
        if not isinstance(target, Sparsity):
            inner = self.start(problem)
            return Refine(inner, swap_seconds=self.swap_seconds)(problem, target)
        if not problem.context.affords(ADMM().search_bytes(problem.shape)):
            return ColumnSweep()(problem, target)
        count = target.count(problem.prunable)
        kept = problem.weight.numel() - count
        if _few_wide_rows(problem.shape):
            rounds = self._rounds(problem, kept, GreedyOBS().seconds(problem.shape))
            return self._from_support(problem, rounds, GreedyOBS().path(problem).mask_at(count))[0]
        share, hard = kept / max(1, problem.weight.numel()), _replaceable(problem, count)
        start = self._first_start(problem, kept, share, hard)
        rounds = self._rounds(problem, kept, start.seconds(problem.shape))
        first = start if rounds or not self.swaps else ADMM()
        found, gained = self._from_support(problem, rounds, *first.support(problem, count))
        poor = share > POLICY.sparse and gained > POLICY.poor_gain * _weighted(problem, found)
        if self.swap_seconds is None and _agreed(problem, hard or poor):
            lossy = found.error > POLICY.lossless * found.energy
            others = self._rescues(problem, count) if _agreed(problem, lossy) else []
        elif problem.weight.numel() * problem.weight.shape[-1] <= POLICY.tiny:
            rounds = self._rounds(problem, kept, GreedyOBS().seconds(problem.shape))
            mask = GreedyOBS().path(problem).mask_at(count)
            others = [self._from_support(problem, rounds, mask)[0]]
        else:
            others = []
        return _best(problem, [found, *others])

    def start(self, problem: Problem) -> GreedyOBS | ADMM | ColumnSweep:
        """Return the solver of the first support where the count is not known."""
        shape = problem.shape
        quick = GreedyOBS().seconds(shape) <= self.patience * ADMM().seconds(shape)
        if quick or (_affordable(problem) and _replaceable(problem, problem.prunable // 2)):
            return GreedyOBS()
        return ADMM() if problem.context.affords(ADMM().search_bytes(shape)) else ColumnSweep()

    def _rounds(self, problem: Problem, kept: int, spent: float, patience: float = 1.0) -> int:
        return _rounds(problem, kept, spent, patience) if self.swaps else 0

    def _first_start(self, problem: Problem, kept: int, share: float, hard: bool) -> ADMM:
        """Return ADMM, with fewer penalties where swaps cost most and still end as low."""
        easy = share > POLICY.much_kept and not hard and self.swap_seconds is None
        if easy and _round_seconds(problem, kept) > POLICY.free_round:
            return ADMM(penalties=POLICY.sketch_penalties, steps=POLICY.sketch_steps)
        return ADMM()

    def _rescues(self, problem: Problem, count: int) -> list[Solution]:
        """Return solutions from other starts: equal energy, and the greedy where affordable."""
        kept = problem.weight.numel() - count
        rounds = self._rounds(problem, kept, 0.0, patience=POLICY.rescue_time)
        support = ADMM(units="energy").support(problem, count)
        found = [self._from_support(problem, rounds, *support)[0]]
        if _affordable(problem):
            mask = GreedyOBS().path(problem).mask_at(count)
            # On such layers swaps may lack digits and make a support worse.
            found += [self._from_support(problem, rounds, mask)[0], on_support(problem, mask)]
        return found

    def _from_support(
        self, problem: Problem, rounds: int, mask: Tensor, near: Tensor | None = None
    ) -> tuple[Solution, float]:
        """Return the solution after swaps, and what the first round gained of weighted error.

        Swaps start at once: least squares on the first support would cost as much as a round.
        """
        if not (self.swaps or near is None):
            return near_support(problem, mask, near), 0.0
        if not rounds:
            return on_support(problem, mask, near), 0.0
        done = swap(problem, mask, near, rounds=rounds, seconds=self.swap_seconds)
        found = on_support(problem, done.mask, done.values)
        if _agreed(problem, found.error <= POLICY.blind * found.energy):
            found = _best(problem, [found, on_support(problem, mask)])
        return found, done.gained


def before_refit(solver: Solver) -> Solver:
    """Return what a solver asks to be replaced by where a layer's block is refitted afterwards."""
    found: Solver = solver.before_refit() if hasattr(solver, "before_refit") else solver
    return found


def seconds_of(solver: Solver, shape: ProblemShape) -> float:
    """Return a solver's estimate of its time; one without an estimate counts as `Auto`."""
    seconds: float = getattr(solver, "seconds", Auto().seconds)(shape)
    return seconds


def bytes_of(solver: Solver, shape: ProblemShape) -> int:
    """Return a solver's estimate of its memory; one without an estimate counts as most do."""
    count: int = solver.bytes(shape) if hasattr(solver, "bytes") else shape.solving_bytes
    return count


def _few_wide_rows(shape: ProblemShape) -> bool:
    """Return whether the greedy takes much less time than ADMM, which inverts d×d matrices."""
    few = shape.groups * shape.rows <= POLICY.few_rows and shape.columns >= POLICY.wide_columns
    if not few or shape.single_copy:
        return False
    return shape.context.affords(GreedyOBS().search_bytes(shape))


def _agreed(problem: Problem, opinion: bool) -> bool:
    """Return the first process's opinion: rounding may differ between processors."""
    return bool(problem.context.group.all_gather(opinion)[0])


def _best(problem: Problem, found: list[Solution]) -> Solution:
    """Return the solution of least weighted error."""
    if len(found) == 1:
        return found[0]
    errors = [_weighted(problem, solution) for solution in found]
    return found[int(problem.context.group.all_gather(errors.index(min(errors)))[0])]


def _weighted(problem: Problem, found: Solution) -> float:
    return found.error if problem.row_weight is None else weighted_error(problem, found.weight)


def _replaceable(problem: Problem, count: int) -> bool:
    """Return whether others nearly replace many of the layer's columns."""
    if not problem.weight.numel() or problem.weight.shape[-1] > POLICY.widest_checked:
        return False
    dependent = first_independence(problem, count) < POLICY.dependent
    return _agreed(problem, float(dependent.double().mean()) > POLICY.replaceable)


def _affordable(problem: Problem) -> bool:
    """Return whether there is time and memory for the greedy where another start may be poor."""
    greedy, shape = GreedyOBS(), problem.shape
    most = min(POLICY.rescue_seconds, POLICY.rescue_time * _rival_seconds(problem))
    room = problem.context.affords(greedy.search_bytes(shape))
    return _agreed(problem, greedy.seconds(shape) <= most and room)


def _rival_seconds(problem: Problem) -> float:
    """Estimate the time of rival solvers."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    decomposition = COSTS.decomposition * len(problem.groups) * d**3
    return (decomposition + COSTS.product * POLICY.rival_products * rows * d**2) / 1e9


def _rounds(problem: Problem, kept: int, spent: float, patience: float = 1.0) -> int:
    """Return how many rounds of swaps fit into the rivals' time after `spent` seconds.

    Mostly one.
    """
    time, one = patience * _rival_seconds(problem), _round_seconds(problem, kept)
    if one <= POLICY.free_round:
        return POLICY.most_rounds
    if one > POLICY.dearest_round * time:
        return 0
    return max(1, min(POLICY.most_rounds, int((time - spent) / one)))


def _round_seconds(problem: Problem, kept: int) -> float:
    """Estimate the time of one round of swaps."""
    d, rows = problem.weight.shape[-1], problem.weight[..., 0].numel()
    pairs = zip(problem.metrics, problem.groups, strict=True)
    digits = 1 if all(single_precision(metric, weight) for metric, (weight, _) in pairs) else 2
    group = problem.weight.shape[-2]
    work = round_work(kept / max(1, rows), d - problem.protected, group)
    return digits * COSTS.product * rows * work / 1e9
