"""The bridge: a network and batches become layer problems, their solutions become a network again."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lobs import bounds, linalg, memory, scores, streams
from lobs.allocate import Curve, RowLosses, allocate, row_losses
from lobs.batchnorm import BatchNormEffect, reestimate, statistics_of, take_up
from lobs.calibrate import Calibration, collect
from lobs.curvature import fisher_diagonal
from lobs.distributed import ALONE, crew, working
from lobs.errors import LobsError
from lobs.forecasting import network_bytes
from lobs.gather import Gathered, gathered
from lobs.influence import output_influence
from lobs.journal import Journal
from lobs.layers import Layer, find_layers
from lobs.ledger import Certificate
from lobs.masks import joined
from lobs.observe import phase, tell
from lobs.outlook import Outlook, look_out
from lobs.problem import Problem, Solution, Solver, check_finite
from lobs.progress import track
from lobs.result import Histogram, LayerResult
from lobs.settled import Settled
from lobs.solvers import solve
from lobs.statistics import Moments, PairedMoments
from lobs.targets import Budget, Sparsity, Structured, Target, for_layer, removable
from lobs.wide import aimed, wide_problem

Inputs: TypeAlias = Literal["dense", "pruned", "asymmetric"]
Packed: TypeAlias = tuple[dict[str, Tensor], Any]
# How far, in mean input energy, the asymmetric target is held to the dense weights: it is fitted to few samples.
_TETHER = 1e-3


def layer_problem(
    layer: Layer,
    dense: Tensor,
    moments: Moments,
    *,
    prune_bias: bool = False,
    damping: float | None = None,
    row_weight: Tensor | None = None,
    curvature: Tensor | None = None,
    mine: bool = False,
) -> Problem:
    """The matrix problem of one layer: reproduce `dense` on the inputs that `moments` saw; they may be used up if `mine`."""
    settings: dict[str, Any] = {
        "bias_column": layer.bias is not None and not prune_bias,
        "mean": moments.mean.to(dense.device),
        "row_weight": row_weight,
        "curvature": curvature,
        "positions": 1 if prune_bias else math.prod(layer.weight.shape[2:]),
        "name": f"layer '{layer.name}'",
    }
    if moments.lean and damping is None:
        return wide_problem(dense, moments, mine=mine, **settings)
    return Problem(dense, moments.moment.to(dense.device), samples=moments.count, damping=damping, **settings)


def asymmetric_problem(problem: Problem, missed: Tensor) -> Problem:
    """The same layer with a wider aim: give on these inputs what the dense layer gives on the dense network's.

    min ‖V X̂ − W X‖² + λ‖V − W‖² has its free optimum at W + W D (Ĥ + λI)⁻¹, D = E[(x − x̂) x̂ᵀ]; what is left to do is the old
    problem with that in place of W. `missed` is W D.
    """
    if problem.units is not None:
        return aimed(problem, missed.to(problem.weight.device))
    parts = []
    for (weight, moment), away in zip(problem.groups, missed.to(problem.weight.device), strict=True):
        lam = _TETHER * float(moment.diagonal().mean())
        if lam == 0:  # nothing reaches the layer, so nothing can be mended there
            parts.append(weight)
            continue
        shift = linalg.ridge_solve(moment, away, lam)
        parts.append((weight.to(torch.float64) + shift).to(weight.dtype))
    return replace(problem, weight=torch.stack(parts).view(problem.weight.shape))


class Job:
    """One network, its data and how it is to be pruned; what several runs have in common is computed once."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        layers: list[Layer],
        solver: Solver,
        inputs: Inputs,
        prune_bias: bool,
        damping: float | None,
        diagnostics: bool,
        batch_norm: bool = True,
        journal: Journal | None = None,
        gather: bool = False,
        room: float | None = None,
    ) -> None:
        self.model, self.batches, self.layers, self.solver, self.inputs = model, batches, layers, solver, inputs
        self.prune_bias, self.damping, self.diagnostics, self.batch_norm = prune_bias, damping, diagnostics, batch_norm
        self.journal = journal or Journal()
        self.runs = self.looks = 0
        self._mine = {layer.name: layer for layer in layers}
        for layer in layers:
            check_finite(f"layer '{layer.name}'", "weight", layer.matrix())
        if gather:  # moments when they are wanted, in passes of `room` bytes
            self.calibration: Calibration = gathered(model, batches, layers, self.journal, room)
        else:
            self.calibration = collect(model, batches, layers, journal=self.journal)
        self.curvature: dict[str, Tensor] = {}
        if "curvature" in solver.needs:
            self.curvature = self._once("curvature", lambda: fisher_diagonal(model, batches, layers))
        self.influence: dict[str, Tensor] = {}
        self._losses: dict[str, RowLosses] = {}
        self._sharing: tuple[Sparsity | Budget, Mapping[str, float] | None] | None = None

    @cached_property
    def prunable(self) -> dict[str, int]:
        """How many weights of each layer may go."""
        biases = {layer.name: layer.groups * layer.rows for layer in self.layers if layer.bias is not None and self.prune_bias}
        return {layer.name: layer.weight.numel() + biases.get(layer.name, 0) for layer in self.layers}

    def dense(self, name: str) -> Tensor:
        """A layer's weights as they were given."""
        return self._mine[name].matrix()

    def problem(self, layer: Layer, moments: Moments, *, mine: bool = False) -> Problem:
        """One layer's problem on some inputs, whose moments may be used up if they are `mine`."""
        return layer_problem(
            layer,
            self.dense(layer.name),
            moments,
            prune_bias=self.prune_bias,
            damping=self.damping,
            row_weight=self.influence.get(layer.name),
            curvature=self.curvature.get(layer.name),
            mine=mine,
        )

    def plan(self, target: Target) -> dict[str, Target | None]:
        """What each layer is asked to do; a budget for all of them is shared out by their error curves."""
        match target:
            case Sparsity(scope="network"):
                total = sum(self.prunable.values())
                return self.shared(target, target.count(total))
            case Budget(parameters=int() | float() as kept):
                return self.shared(target, max(0.0, sum(self.prunable.values()) - kept))
            case Budget(bytes=int() | float() as size):
                return self.shared(target, max(0.0, self._bytes() - size), self._bytes_each())
            case Budget(flops=int() | float() as flops):
                uses = self._flops_each()
                spent = sum(uses[name] * n for name, n in self.prunable.items())
                return self.shared(target, max(0.0, spent - flops), uses)
            case Structured():
                target = target.inside(list(self.calibration))
        return {layer.name: for_layer(target, layer.name) for layer in self.layers}

    def shared(
        self, target: Sparsity | Budget, give: float, prices: Mapping[str, float] | None = None
    ) -> dict[str, Target | None]:
        """Every layer's count from one budget, by error curves on the dense network."""
        if not self._losses:
            self._measure()
        self._sharing = target, prices
        counts = allocate(self._curves(target, prices), give)
        return {name: Sparsity(count / max(1, self.prunable[name]), scope="layer") for name, count in counts.items()}

    def _curves(self, target: Sparsity | Budget, prices: Mapping[str, float] | None) -> dict[str, Curve]:
        curves = {}
        for layer in self.layers:
            n = self.prunable[layer.name]
            limits = removable(target, layer.name, n)
            price = 1.0 if prices is None else prices[layer.name]
            curves[layer.name] = self._losses[layer.name].curve(n, self.influence[layer.name], *limits, price)
        return curves

    def outlook(self, outcome: Outcome) -> Outlook | None:
        """What other budgets would have asked of the layers, where one budget was shared out; no further pruning."""
        if self._sharing is None:
            return None
        done = {name: solution.removed for name, solution in outcome.solutions.items()}
        return look_out(self._curves(*self._sharing), self._losses, self.influence, done)

    def _measure(self) -> None:
        self.influence = self._influence(self.model, self.layers)
        self._gather()
        missing = [layer for layer in self.layers if not self.journal.has(f"curve of {layer.name}")]
        ahead = self._apart(missing, lambda layer: (row_losses(self._dense_problem(layer)).packed(), None), "error curves")
        with track("error curves", len(self.layers)) as advance:
            for layer in self.layers:
                found = self._once(f"curve of {layer.name}", lambda: next(ahead)[0])
                self._losses[layer.name] = RowLosses.unpacked(found)
                advance(1)

    def _apart(self, layers: Sequence[Layer], work: Callable[[Layer], Packed], label: str) -> Iterator[Packed]:
        """Do independent work on layers, each by one process of the crew; gives all of it to all, in order."""
        together = crew()
        if together.size == 1:
            yield from map(work, layers)
            return
        owners = together.owners([layer.weight.numel() * float(layer.columns) for layer in layers])
        mine: dict[str, Packed] = {}
        with together.agree(), working(ALONE), track(label, owners.count(together.rank)) as advance:
            for layer, owner in zip(layers, owners, strict=True):
                if owner == together.rank:
                    mine[layer.name] = work(layer)
                    advance(1)
        for layer, owner in zip(layers, owners, strict=True):
            yield together.give(*mine.get(layer.name, (None, None)), by=owner)

    def _influence(self, model: nn.Module, layers: list[Layer]) -> dict[str, Tensor]:
        self.looks += 1
        skipped = self.calibration.drawn_elsewhere(crew().rank) if crew().size > 1 else ()
        compute = partial(output_influence, model, self.batches, layers, skipped=skipped)
        return self._once(f"influence {self.looks}", compute)

    def _once(self, key: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Some tensors by name: those in the journal, or computed now and put there."""
        found = self.journal.read(key)
        if found is not None:
            return dict(found.state_dict)
        tensors = compute()
        self.journal.write(key, tensors, {})
        return tensors

    def look_again(self, pruned: nn.Module) -> None:
        """Let a pruned network say how much each unit matters: at high sparsity that is no longer what the dense one says."""
        layers = find_layers(pruned, [layer.name for layer in self.layers])
        self.influence = self._influence(pruned, layers)

    def _bytes_each(self) -> dict[str, float]:
        return {layer.name: float(layer.weight.element_size()) for layer in self.layers}

    def _bytes(self) -> float:
        """All tensors, and a bit for every prunable weight."""
        return float(network_bytes(self.model) + sum(-(-n // 8) for n in self.prunable.values()))

    def _flops_each(self) -> dict[str, float]:
        seen, samples = self.calibration, self.calibration.samples
        return {layer.name: 2 * seen.count(layer.name) / samples * layer.uses_per_patch for layer in self.layers}

    def run(self, plan: Mapping[str, Target | None]) -> Outcome:
        """Prune a copy of the network, every layer by its own target, and re-estimate batch norms where that is wanted."""
        outcome = self._prune(plan)
        if self.batch_norm:
            outcome.renew_norms()
        return outcome

    def _prune(self, plan: Mapping[str, Target | None]) -> Outcome:
        pruned = _copied(self.model)
        self.runs += 1
        outcome = Outcome(self, pruned, self.runs)
        twins = {layer.name: layer for layer in find_layers(pruned, [layer.name for layer in self.layers])}
        if self.inputs == "dense":
            self._gather()
            missing = [twins[name] for name in self.calibration if not outcome.known(twins[name])]

            def work(layer: Layer) -> Packed:
                return outcome.solved(layer, self._dense_problem(layer), plan[layer.name]).packed()

            ahead = self._apart(missing, work, "prune")
            with track("prune", len(self.layers)) as advance:
                for name in self.calibration:
                    outcome.settle(twins[name], lambda: next(ahead))
                    advance(1)
            return outcome
        pairs = [(self._mine[name], twins[name]) for name in self.calibration]
        # A layer that the target leaves alone stays as it is, to the bit.
        pairs = [pair for pair in pairs if plan[pair[0].name] is not None]
        known = [before.name for before, _ in pairs if outcome.known(before)]
        for layer, moments in streams.walk(self.model, pruned, self.batches, pairs, known):
            outcome.settle(layer, partial(self._sequential, outcome, layer, moments, plan[layer.name]))
        for name in self.calibration:
            if plan[name] is None:
                problem = self._dense_problem(twins[name])
                outcome.settle(twins[name], lambda: outcome.solved(twins[name], problem, None).packed())  # noqa: B023
        return outcome

    def _gather(self) -> None:
        """All processes together, before each works on layers of its own."""
        if isinstance(self.calibration, Gathered):
            self.calibration.prepare()

    def _dense_problem(self, layer: Layer) -> Problem:
        # With a limit of memory every look at a layer's moments reads them anew.
        return self.problem(layer, self.calibration[layer.name], mine=memory.limit() is not None)

    def _sequential(self, outcome: Outcome, layer: Layer, moments: PairedMoments | None, target: Target | None) -> Packed:
        assert moments is not None  # only layers that the journal knows come without
        missed = moments.missed(self.dense(layer.name)) if self.inputs == "asymmetric" else None
        problem = self.problem(layer, moments.pruned, mine=True)
        if missed is not None:
            problem = asymmetric_problem(problem, missed)
        # All processes have solved the same problem; the leader's answer makes sure that they go on with the same bits.
        return crew().give(*outcome.solved(layer, problem, target).packed())


@dataclass
class Outcome:
    """One pruned network and what came of its layers."""

    job: Job
    model: nn.Module
    number: int = 1
    masks: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, LayerResult] = field(default_factory=dict)
    solutions: dict[str, Solution] = field(default_factory=dict)
    largest_errors: dict[str, float] = field(default_factory=dict)
    norms: BatchNormEffect | None = None

    def known(self, layer: Layer) -> bool:
        """Has an earlier, interrupted run settled this layer?"""
        return self.job.journal.has(self._key(layer))

    def _key(self, layer: Layer) -> str:
        return f"run {self.number} layer {layer.name}"

    def settle(self, layer: Layer, solve: Callable[[], Packed]) -> None:
        """Write one layer, as the journal has it or as it is solved now, and note what happened."""
        saved = self.job.journal.read(self._key(layer))
        packed: Packed = solve() if saved is None else (saved.state_dict, saved.record)
        if saved is None:
            self.job.journal.write(self._key(layer), *packed)
        done = Settled.unpacked(packed[0], packed[1], layer.weight)
        tell("layer", layer=layer.name, kept=done.result.kept, error=done.result.error, found_done=saved is not None)
        layer.write(done.solution.weight)
        self.solutions[layer.name] = done.solution if memory.limit() is None else done.solution.without_tensors()
        self.largest_errors[layer.name] = done.largest_error
        self.masks = joined(self.masks, layer.masks(done.solution.mask))
        self.results[layer.name] = done.result

    def solved(self, layer: Layer, problem: Problem, target: Target | None) -> Settled:
        """Solve one layer."""
        began = time.perf_counter()
        with phase("solve", layer=layer.name):
            if target is None:  # the user's mapping may leave a layer alone; it stays as it is, to the bit
                solution = replace(solve(problem, "magnitude", 0.0), weight=self.job.dense(layer.name), error=0.0)
            else:
                solution = solve(problem, self.job.solver, target)
        result = LayerResult(
            name=layer.name,
            shape=tuple(layer.weight.shape),
            kept=solution.kept,
            total=solution.prunable,
            error=solution.error,
            relative_error=solution.relative_error,
            damping=solution.damping,
            seconds=time.perf_counter() - began,
            samples=problem.samples or 0,
            parameters=layer.parameters(),
            sensitivity=_histogram(problem) if self.job.diagnostics else None,
        )
        return Settled(solution, result, solution.error + problem.hidden_error_of(solution.weight))

    def renew_norms(self) -> None:
        """Re-estimate batch norms behind layers that lost weights, where that brings the output nearer to the dense one's."""
        job, key = self.job, f"run {self.number} norms"
        names = [name for name, solution in self.solutions.items() if solution.removed]
        saved = job.journal.read(key)
        if saved is not None:
            self.norms = take_up(self.model, saved.state_dict, saved.record["effect"])
        elif names:
            self.norms = reestimate(
                self.model,
                find_layers(self.model, names),
                job.batches,
                lambda: bounds.deviation(job.model, self.model, job.batches, job.calibration.samples),
            )
            job.journal.write(key, statistics_of(self.model), {"effect": self.norms and asdict(self.norms)})

    def certify(self, held_out: Iterable[Any] | None) -> Certificate:
        """The bound beside what is measured.

        With asymmetric inputs a layer's error is the distance between its outputs in the two networks, which is measured
        here, after the fact: it holds what reached the layer as well as what the layer added or mended.
        """
        job = self.job
        if job.inputs != "asymmetric":
            return bounds.certificate(
                job.model,
                self.model,
                job.calibration,
                bounds.layer_errors(self.largest_errors, job.calibration),
                batches=job.batches,
                held_out=held_out,
                dense_gains={name: job.dense(name) for name in job.calibration} if job.inputs == "pruned" else None,
            )
        twins = {layer.name: layer for layer in find_layers(self.model, [layer.name for layer in job.layers])}
        pairs = [(layer, twins[layer.name]) for layer in job.layers]
        apart = bounds.distances(job.model, self.model, job.batches, pairs, job.calibration.samples)
        errors = {}
        for name, (error, energy, count) in apart.layers.items():
            relative = math.sqrt(error / energy) if energy else (math.inf if error else 0.0)
            self.results[name] = replace(self.results[name], error=error / max(1, count), relative_error=relative)
            # Outputs are right to float32's last digit; the bound must hold all the same.
            errors[name] = math.sqrt(error / job.calibration.samples) + 1e-6 * math.sqrt(energy / job.calibration.samples)
        return bounds.certificate(
            job.model, self.model, job.calibration, errors,
            batches=job.batches, held_out=held_out, measured=apart.output, absorbed=True,
        )  # fmt: skip


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # networks may hold what cannot be copied: locks, open files, tensors with a history
        text = " ".join(str(error).split())
        raise LobsError(
            f"the network cannot be copied ({type(error).__name__}: {text}), and solving happens on a copy. Take out of it "
            f"what is no module, parameter or plain value."
        ) from error


def sensitivities(problem: Problem) -> tuple[Tensor, float]:
    """The error of deleting each prunable weight alone, flat, and the damping this took."""
    values = [
        scores.obs(weight, metric)[:, : weight.shape[-1] - problem.protected].flatten()
        for metric, (weight, _) in zip(problem.metrics, problem.groups, strict=True)
    ]
    return torch.cat(values).cpu(), max(metric.damping for metric in problem.metrics)


def _histogram(problem: Problem, bins: int = 60) -> Histogram:
    """Sensitivities of all prunable weights on a log₁₀ scale."""
    values, _ = sensitivities(problem)
    logs = values[values > 0].log10()
    if not len(logs):
        return Histogram((), (), len(values))
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    counts = torch.histc(logs, bins, low, high)
    edges = torch.linspace(low, high, bins + 1)
    return Histogram(tuple(edges.tolist()), tuple(int(c) for c in counts), len(values) - len(logs))
