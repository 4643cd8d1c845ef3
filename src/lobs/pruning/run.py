"""A plan carried out: a copy of the network is pruned layer by layer, and what came of it is noted and measured."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lobs.certificate import certify

from lobs._system import memory

from lobs.calibration import paired
from lobs.calibration.batch_norm import BatchNormEffect, reestimate, statistics_of, take_up
from lobs.calibration.layer_problem import asymmetric_problem, histogram
from lobs.pruning.refit.joint import Compensation, compensate
from lobs._system.distributed import process_group
from lobs.errors import LobsError
from lobs.pruning.refit.gauss_newton import parameters_of
from lobs.pruning.session import Job, Packed
from lobs.layers import Layer, find_layers
from lobs.certificate.bound import Certificate
from lobs.solvers.masks import joined
from lobs._system.run_log import log_event, phase
from lobs.solvers.problem import Problem
from lobs._system.progress import track
from lobs.pruning.result import LayerResult
from lobs.pruning.finished import FinishedLayer
from lobs.solvers.solution import Solution
from lobs.solvers import solve
from lobs.calibration.moments import PairedMoments
from lobs.targets import Target


def run(job: Job, plan: Mapping[str, Target | None], *, last: bool = True) -> Outcome:
    """Prune a copy of a job's network, every layer by its own target; then what concerns all layers, where that is wanted.

    That is batch norms' statistics and, in the `last` run, moving all surviving weights together.
    """
    job.runs += 1
    outcome = Outcome(job, _copied(job.model), job.runs)
    if job.inputs == "dense":
        _prune_apart(outcome, plan)
    else:
        _prune_in_order(outcome, plan)
    if job.batch_norm:
        outcome.renew_norms()
    if last and job.compensate == "network":
        outcome.compensate([name for name, target in plan.items() if target is not None])
    return outcome


def _prune_apart(outcome: Outcome, plan: Mapping[str, Target | None]) -> None:
    """Every layer on what the dense network feeds it: no layer waits for another."""
    job, twins = outcome.job, outcome.twins()
    job.gather()
    missing = [twins[name] for name in job.calibration if not outcome.known(twins[name])]

    def work(layer: Layer) -> Packed:
        return outcome.solved(layer, job.dense_problem(layer), plan[layer.name]).packed()

    ahead = job.apart(missing, work, "prune")
    with track("prune", len(job.layers)) as advance:
        for name in job.calibration:
            outcome.finish(twins[name], lambda: next(ahead))
            advance(1)


def _prune_in_order(outcome: Outcome, plan: Mapping[str, Target | None]) -> None:
    """Every layer on what the pruned layers before it feed it."""
    job, twins = outcome.job, outcome.twins()
    before = {layer.name: layer for layer in job.layers}
    # A layer that the target leaves alone stays as it is, to the bit.
    pairs = [(before[name], twins[name]) for name in job.calibration if plan[name] is not None]
    known = [layer.name for layer, _ in pairs if outcome.known(layer)]
    for layer, moments in paired.walk(job.model, outcome.model, job.batches, pairs, known):
        outcome.finish(layer, partial(_solve_in_order, outcome, layer, moments, plan[layer.name]))
    for name in job.calibration:
        if plan[name] is None:
            problem = job.dense_problem(twins[name])
            outcome.finish(twins[name], lambda: outcome.solved(twins[name], problem, None).packed())  # noqa: B023


def _solve_in_order(
    outcome: Outcome, layer: Layer, moments: PairedMoments | None, target: Target | None
) -> Packed:
    job = outcome.job
    assert moments is not None  # only layers that the run store knows come without
    missed = moments.missed(job.dense(layer.name)) if job.inputs == "asymmetric" else None
    problem = job.problem(layer, moments.pruned, overwrite=True)
    if missed is not None:
        problem = asymmetric_problem(problem, missed)
    # All processes have solved the same problem; the leader's answer makes sure that they go on
    # with the same bits.
    return process_group().broadcast_object(*outcome.solved(layer, problem, target).packed())


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
    compensation: Compensation | None = None
    apart: certify.Distances | None = None  # from the dense network, once measured

    def twins(self) -> dict[str, Layer]:
        """The layers of the pruned network by name."""
        return {
            layer.name: layer
            for layer in find_layers(self.model, [layer.name for layer in self.job.layers])
        }

    def known(self, layer: Layer) -> bool:
        """Has an earlier, interrupted run finished this layer?"""
        return self.job.run_store.has(self._key(layer))

    def _key(self, layer: Layer) -> str:
        return f"run {self.number} layer {layer.name}"

    def finish(self, layer: Layer, solve: Callable[[], Packed]) -> None:
        """Write one layer, as the run store has it or as it is solved now, and note what happened."""
        saved = self.job.run_store.read(self._key(layer))
        packed: Packed = solve() if saved is None else (saved.state_dict, saved.record)
        if saved is None:
            self.job.run_store.write(self._key(layer), *packed)
        done = FinishedLayer.unpacked(packed[0], packed[1], layer.weight)
        log_event(
            "layer",
            layer=layer.name,
            kept=done.result.kept,
            error=done.result.error,
            found_done=saved is not None,
        )
        layer.write(done.solution.weight)
        self.solutions[layer.name] = (
            done.solution if memory.limit() is None else done.solution.without_tensors()
        )
        self.largest_errors[layer.name] = done.largest_error
        self.masks = joined(self.masks, layer.masks(done.solution.mask))
        self.results[layer.name] = done.result

    def solved(self, layer: Layer, problem: Problem, target: Target | None) -> FinishedLayer:
        """Solve one layer."""
        began = time.perf_counter()
        with phase("solve", layer=layer.name):
            if (
                target is None
            ):  # the user's mapping may leave a layer alone; it stays as it is, to the bit
                solution = replace(
                    solve(problem, "magnitude", 0.0), weight=self.job.dense(layer.name), error=0.0
                )
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
            sensitivity=histogram(problem) if self.job.diagnostics else None,
        )
        return FinishedLayer(
            solution, result, solution.error + problem.hidden_error_of(solution.weight)
        )

    def renew_norms(self) -> None:
        """Re-estimate batch norms behind layers that lost weights, where that brings the output nearer to the dense one's."""
        job, key = self.job, f"run {self.number} norms"
        saved = job.run_store.read(key)
        if saved is not None:
            self.norms = take_up(self.model, saved.state_dict, saved.record["effect"])
        elif any(solution.removed for solution in self.solutions.values()):
            looks: list[certify.Distances] = []

            def compare(each: Callable[[Any], None] | None) -> float | None:
                looks.append(self._distances(each))
                return looks[-1].output

            self.norms = reestimate(self.model, job.model, compare)
            if looks:
                self.apart = looks[-1] if self.norms is None or self.norms.changed else looks[0]
            job.run_store.write(
                key, statistics_of(self.model), {"effect": self.norms and asdict(self.norms)}
            )

    def compensate(self, names: Iterable[str]) -> None:
        """Move all surviving weights of some layers together, where that brings the output nearer to the dense one's."""
        job, key, twins = self.job, f"run {self.number} compensation", self.twins()
        layers = [twins[name] for name in names]
        parameters = parameters_of(
            self.model, {name for layer in layers for name in layer.parameters()}
        )
        saved = job.run_store.read(key)
        if saved is not None:
            self.compensation = Compensation(**saved.record["effect"])
            for name, parameter in parameters.items():
                parameter.data.copy_(saved.state_dict[name])
        elif any(solution.removed for solution in self.solutions.values()):
            with phase("compensate"):
                self.compensation = compensate(
                    self.model, job.model, job.batches, layers, self.masks,
                    samples=job.calibration.samples, madds=job.madds, work=job.work,
                )  # fmt: skip
            job.run_store.write(
                key,
                {n: t.detach() for n, t in parameters.items()},
                {"effect": asdict(self.compensation)},
            )
        if self.compensation is not None and self.compensation.steps:
            self.apart = None  # what was measured before no longer holds

    def _distances(self, each: Callable[[Any], None] | None = None) -> certify.Distances:
        """How far this network is from the dense one, with asymmetric inputs at every layer."""
        job, twins = self.job, self.twins()
        pairs = (
            [(layer, twins[layer.name]) for layer in job.layers]
            if job.inputs == "asymmetric"
            else []
        )
        return certify.distances(
            job.model, self.model, job.batches, pairs, job.calibration.samples, each
        )

    def certify(self, held_out: Iterable[Any] | None) -> Certificate:
        """The bound beside what is measured.

        With asymmetric inputs a layer's error is the distance between its outputs in the two
        networks, which is measured here, after the fact: it holds what reached the layer as well as
        what the layer added or mended.
        """
        job, twins = self.job, self.twins()
        moved = self.compensation is not None and self.compensation.steps
        apart = self.apart or self._distances()
        if job.inputs != "asymmetric":
            return certify.certificate(
                job.model,
                self.model,
                job.calibration,
                certify.layer_errors(self.largest_errors, job.calibration),
                apart,
                held_out=held_out,
                dense_gains={name: job.dense(name) for name in job.calibration}
                if job.inputs == "pruned"
                else None,
            )
        errors = {}
        for name, (error, energy, count) in apart.layers.items():
            relative = math.sqrt(error / energy) if energy else (math.inf if error else 0.0)
            self.results[name] = replace(
                self.results[name], error=error / max(1, count), relative_error=relative
            )
            if moved:  # the solver's answer is no longer what the network holds
                self.solutions[name] = replace(
                    self.solutions[name],
                    weight=twins[name].matrix(),
                    error=error / max(1, count),
                    energy=energy / max(1, count),
                    curve=None,
                )
            # Outputs are right to float32's last digit; the bound must hold all the same.
            errors[name] = math.sqrt(error / job.calibration.samples) + 1e-6 * math.sqrt(
                energy / job.calibration.samples
            )
        return certify.certificate(
            job.model, self.model, job.calibration, errors, apart, held_out=held_out, absorbed=True
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    # networks may hold what cannot be copied: locks, open files, tensors with a history
    except Exception as error:
        text = " ".join(str(error).split())
        raise LobsError(
            f"the network cannot be copied ({type(error).__name__}: {text}), and solving happens "
            "on a copy. Take out of it "
            f"what is no module, parameter or plain value."
        ) from error
