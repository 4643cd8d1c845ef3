"""The bridge: a network and batches become layer problems, their solutions become a network again."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lobs import bounds, linalg, scores, streams
from lobs.allocate import Curve, RowLosses, allocate, row_losses
from lobs.batchnorm import BatchNormEffect, reestimate
from lobs.calibrate import Calibration, collect
from lobs.curvature import fisher_diagonal
from lobs.influence import output_influence
from lobs.layers import Layer, find_layers
from lobs.ledger import Certificate
from lobs.masks import joined
from lobs.outlook import Outlook, look_out
from lobs.problem import Problem, Solution, Solver
from lobs.progress import track
from lobs.result import Histogram, LayerResult
from lobs.solvers import solve
from lobs.statistics import Moments, PairedMoments
from lobs.targets import Budget, Sparsity, Structured, Target, for_layer, removable

Inputs: TypeAlias = Literal["dense", "pruned", "asymmetric"]
Evaluate: TypeAlias = Callable[[nn.Module], float]
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
) -> Problem:
    """The matrix problem of one layer: reproduce `dense` on the inputs that `moments` saw."""
    return Problem(
        dense,
        moments.moment.to(dense.device),
        bias_column=layer.bias is not None and not prune_bias,
        mean=moments.mean.to(dense.device),
        samples=moments.count,
        damping=damping,
        row_weight=row_weight,
        curvature=curvature,
        positions=1 if prune_bias else math.prod(layer.weight.shape[2:]),
        name=f"layer '{layer.name}'",
    )


def asymmetric_problem(problem: Problem, difference: Tensor) -> Problem:
    """The same layer with a wider aim: give on these inputs what the dense layer gives on the dense network's.

    min ‖V X̂ − W X‖² + λ‖V − W‖² has its free optimum at W + W D (Ĥ + λI)⁻¹, D = E[(x − x̂) x̂ᵀ]; what is left to do is the old
    problem with that in place of W.
    """
    parts = []
    for (weight, moment), d in zip(problem.groups, difference.to(problem.weight.device), strict=True):
        lam = _TETHER * float(moment.diagonal().mean())
        shift = linalg.ridge_solve(moment, weight.to(torch.float64) @ d, lam)
        parts.append((weight.to(torch.float64) + shift).to(weight.dtype))
    return replace(problem, weight=torch.stack(parts).view(problem.weight.shape))


@dataclass(frozen=True)
class Trial:
    """One look at a score on the way to a largest drop."""

    kept: int
    score: float
    drop: float


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
    ) -> None:
        self.model, self.batches, self.layers, self.solver, self.inputs = model, batches, layers, solver, inputs
        self.prune_bias, self.damping, self.diagnostics, self.batch_norm = prune_bias, damping, diagnostics, batch_norm
        self.dense = {layer.name: layer.matrix() for layer in layers}
        self.calibration: Calibration = collect(model, batches, layers)
        self.curvature = fisher_diagonal(model, batches, layers) if "curvature" in solver.needs else {}
        self.influence: dict[str, Tensor] = {}
        self._losses: dict[str, RowLosses] = {}
        self._sharing: tuple[Sparsity | Budget, Mapping[str, float] | None] | None = None

    @cached_property
    def prunable(self) -> dict[str, int]:
        """How many weights of each layer may go."""
        return {layer.name: self.problem(layer, self.calibration[layer.name]).prunable for layer in self.layers}

    def problem(self, layer: Layer, moments: Moments) -> Problem:
        """One layer's problem on some inputs."""
        return layer_problem(
            layer,
            self.dense[layer.name],
            moments,
            prune_bias=self.prune_bias,
            damping=self.damping,
            row_weight=self.influence.get(layer.name),
            curvature=self.curvature.get(layer.name),
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
        self.influence = output_influence(self.model, self.batches, self.layers)
        with track("error curves", len(self.layers)) as advance:
            for layer in self.layers:
                self._losses[layer.name] = row_losses(self.problem(layer, self.calibration[layer.name]))
                advance(1)

    def look_again(self, pruned: nn.Module) -> None:
        """Let a pruned network say how much each unit matters: at high sparsity that is no longer what the dense one says."""
        layers = find_layers(pruned, [layer.name for layer in self.layers])
        self.influence = output_influence(pruned, self.batches, layers)

    def _bytes_each(self) -> dict[str, float]:
        return {layer.name: float(layer.weight.element_size()) for layer in self.layers}

    def _bytes(self) -> float:
        """All tensors, and a bit for every prunable weight."""
        everything = sum(int(t.numel() * t.element_size()) for t in self.model.state_dict().values())
        return float(everything + sum(-(-n // 8) for n in self.prunable.values()))

    def _flops_each(self) -> dict[str, float]:
        seen, samples = self.calibration, self.calibration.samples
        return {layer.name: 2 * seen[layer.name].count / samples * layer.uses_per_patch for layer in self.layers}

    def run(self, plan: Mapping[str, Target | None]) -> Outcome:
        """Prune a copy of the network, every layer by its own target, and re-estimate batch norms where that is wanted."""
        outcome = self._prune(plan)
        if self.batch_norm:
            outcome.renew_norms()
        return outcome

    def _prune(self, plan: Mapping[str, Target | None]) -> Outcome:
        pruned = copy.deepcopy(self.model)
        outcome = Outcome(self, pruned)
        twins = {layer.name: layer for layer in find_layers(pruned, [layer.name for layer in self.layers])}
        if self.inputs == "dense":
            with track("prune", len(self.layers)) as advance:
                for name in self.calibration:
                    outcome.solve(twins[name], self.problem(twins[name], self.calibration[name]), plan[name])
                    advance(1)
            return outcome
        mine = {layer.name: layer for layer in self.layers}
        pairs = [(mine[name], twins[name]) for name in self.calibration]
        # A layer that the target leaves alone stays as it is, to the bit.
        pairs = [pair for pair in pairs if plan[pair[0].name] is not None]
        for layer, moments in streams.walk(self.model, pruned, self.batches, pairs):
            outcome.solve(layer, self._sequential(layer, moments), plan[layer.name])
        for name in self.calibration:
            if plan[name] is None:
                outcome.solve(twins[name], self.problem(twins[name], self.calibration[name]), None)
        return outcome

    def _sequential(self, layer: Layer, moments: PairedMoments) -> Problem:
        problem = self.problem(layer, moments.pruned)
        return asymmetric_problem(problem, moments.difference) if self.inputs == "asymmetric" else problem


@dataclass
class Outcome:
    """One pruned network and what came of its layers."""

    job: Job
    model: nn.Module
    masks: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, LayerResult] = field(default_factory=dict)
    solutions: dict[str, Solution] = field(default_factory=dict)
    largest_errors: dict[str, float] = field(default_factory=dict)
    norms: BatchNormEffect | None = None

    def solve(self, layer: Layer, problem: Problem, target: Target | None) -> None:
        """Solve one layer, write it, and note what happened."""
        began = time.perf_counter()
        # The user's mapping may leave a layer alone.
        solution = solve(problem, "magnitude", 0.0) if target is None else solve(problem, self.job.solver, target)
        layer.write(solution.weight)
        self.solutions[layer.name] = solution
        self.largest_errors[layer.name] = problem.largest_error_of(solution.weight)
        self.masks = joined(self.masks, layer.masks(solution.mask))
        self.results[layer.name] = LayerResult(
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

    def renew_norms(self) -> None:
        """Re-estimate batch norms behind layers that lost weights, where that brings the output nearer to the dense one's."""
        job = self.job
        names = [name for name, solution in self.solutions.items() if solution.removed]
        if names:
            self.norms = reestimate(
                self.model,
                find_layers(self.model, names),
                job.batches,
                lambda: bounds.deviation(job.model, self.model, job.batches, job.calibration.samples),
            )

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
                dense_gains=job.dense if job.inputs == "pruned" else None,
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


def search(job: Job, budget: Budget, max_drop: float, evaluate: Evaluate, *, looks: int = 8) -> tuple[Outcome, list[Trial]]:
    """The fewest weights whose score stays within `max_drop` of the dense network's, by bisection of log(kept).

    Every trial prunes anew and is reported. The answer is the smallest network that was tried and passed; with nothing removed
    there is no drop, so there always is one.
    """
    dense = float(evaluate(job.model))
    total = sum(job.prunable.values())
    trials: list[Trial] = []
    best: Outcome | None = None
    low, high = math.log(max(1, total // 1000)), math.log(max(1, total))
    with track("trials", looks) as advance:
        for look in range(looks):
            # The first look guesses where most networks break; the others halve what is left.
            middle = high + math.log(0.1) if look == 0 else (low + high) / 2
            kept = max(1, round(math.exp(middle)))
            outcome = job.run(job.shared(budget, total - kept))
            score = float(evaluate(outcome.model))
            trials.append(Trial(kept, score, dense - score))
            if dense - score <= max_drop:
                best, high = outcome, math.log(kept)
            else:
                low = math.log(kept)
            advance(1)
            if high - low < math.log(1.03):
                break
    return best or job.run(job.shared(budget, 0)), trials


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
