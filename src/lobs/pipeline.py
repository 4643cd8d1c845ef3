"""The bridge: a network and batches become layer problems, their solutions become a network again."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lobs import bounds, scores
from lobs.allocate import allocate
from lobs.calibrate import Calibration, collect
from lobs.curvature import fisher_diagonal
from lobs.errors import CalibrationError, LobsError
from lobs.influence import output_influence
from lobs.layers import Layer, find_layers
from lobs.problem import Problem, Solution, Solver
from lobs.progress import shown, track
from lobs.result import Histogram, LayerResult, Pruning
from lobs.solvers import DeletionPath, Exact, as_solver, solve
from lobs.statistics import Moments
from lobs.targets import Sparsity, Target, as_target, check_names, for_layer

Inputs: TypeAlias = Literal["dense", "pruned"]


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    target: Target | float,
    *,
    solver: str | Solver = "exact",
    inputs: Inputs = "dense",
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    inplace: bool = False,
    progress: bool = True,
    prune_bias: bool = False,
    damping: float | None = None,
    diagnostics: bool = False,
    held_out: Iterable[Any] | None = None,
) -> Pruning:
    """Remove weights from a trained network and move the rest to compensate.

    Args:
        model: a trained network; untouched unless `inplace`, and then written only after everything has succeeded.
        batches: unlabelled inputs, a few hundred or more: an iterable of tensors, of tuples whose first item is the input, or
            of mappings of keyword arguments.
        target: `Sparsity`, `ErrorBudget`, or a number for the fraction removed from every layer.
        solver: a name from `SOLVERS`, or a solver.
        inputs: "dense": every layer sees what the dense network feeds it, one pass over the data. "pruned": layers are
            pruned in the order they run and each sees what the pruned layers before it give, one pass a layer.
        layers: names or globs of the layers to prune; all Linear and Conv2d by default.
        skip: names or globs of layers to leave alone.
        inplace: write into `model` itself instead of a copy.
        progress: draw progress bars on a terminal for what takes over two seconds.
        prune_bias: let biases be removed too, and count them.
        damping: λ added to every Ψ's diagonal; chosen, and reported, by default.
        diagnostics: also record the distribution of sensitivities, for the report.
        held_out: other inputs, to measure on them too how far the output moved.

    Returns:
        A `Pruning`: `.model`, `.masks`, `.layers`, `.certificate`, `.summary()`, `.save(path)`.
    """
    began = time.perf_counter()
    wanted = as_target(target)
    chosen = as_solver(solver)
    if inputs not in ("dense", "pruned"):
        raise LobsError(f"inputs is '{inputs}': use 'dense' or 'pruned'.")
    again = not isinstance(batches, Iterator)
    if inputs == "pruned" and not again:
        raise CalibrationError("inputs='pruned' runs the data once per layer: pass a list or a DataLoader, not a generator.")
    found = find_layers(model, layers, skip)
    check_names(wanted, [layer.name for layer in found])
    dense = {layer.name: layer.matrix() for layer in found}

    pruned = copy.deepcopy(model)
    twins = {layer.name: layer for layer in find_layers(pruned, [layer.name for layer in found])}
    job = _Job(wanted, chosen, prune_bias, damping, diagnostics)
    network_wide = isinstance(wanted, Sparsity) and wanted.scope == "network"
    if network_wide and not (again and isinstance(chosen, Exact)):
        raise LobsError("scope='network' needs error curves and two passes: use solver='exact' and a list or DataLoader.")
    with shown(progress):
        calibration = collect(model, batches, found, progress=progress)
        calibrated = time.perf_counter() - began
        if network_wide:
            job.share_out(found, dense, calibration, output_influence(model, batches, found))
        if "curvature" in chosen.needs:
            if not again:
                raise CalibrationError(f"solver {solver!r} runs the data twice: pass a list or a DataLoader, not a generator.")
            job.curvature = fisher_diagonal(model, batches, found)
        if inputs == "dense":
            with track("prune", len(found)) as advance:
                for name in calibration:
                    twins[name].write(job.solve(twins[name], dense[name], calibration[name]))
                    advance(1)
        else:
            calibration = _one_by_one(pruned, batches, twins, dense, job, calibration)
        certificate = bounds.certificate(
            model,
            pruned,
            calibration,
            bounds.layer_errors(job.largest_errors, calibration),
            batches=batches if again else None,
            held_out=held_out,
            dense_gains=dense if inputs == "pruned" else None,
        )
    if inplace:
        model.load_state_dict(pruned.state_dict())
        pruned = model
    settings = {
        "target": repr(wanted),
        "solver": repr(chosen),
        "inputs": inputs,
        "samples": calibration.samples,
        "calibration seconds": round(calibrated, 2),
    }
    return Pruning(
        model=pruned,
        masks=job.masks,
        layers=tuple(job.results[layer.name] for layer in found),
        certificate=certificate,
        solutions=job.solutions,
        settings=settings,
        seconds=time.perf_counter() - began,
    )


def layer_problem(
    layer: Layer,
    dense: Tensor,
    moments: Moments,
    *,
    prune_bias: bool = False,
    damping: float | None = None,
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
        name=f"layer '{layer.name}'",
        curvature=curvature,
    )


class _Job:
    """What is to be done with each layer, and what came of it."""

    def __init__(self, target: Target, solver: Solver, prune_bias: bool, damping: float | None, diagnostics: bool) -> None:
        self.target, self.solver, self.damping = target, solver, damping
        self.prune_bias, self.diagnostics = prune_bias, diagnostics
        self.masks: dict[str, Tensor] = {}
        self.results: dict[str, LayerResult] = {}
        self.solutions: dict[str, Solution] = {}
        self.largest_errors: dict[str, float] = {}
        self.shared: dict[str, tuple[Moments, DeletionPath]] = {}
        self.counts: dict[str, int] = {}
        self.influence: dict[str, Tensor] = {}
        self.curvature: dict[str, Tensor] = {}

    def share_out(
        self, layers: list[Layer], dense: Mapping[str, Tensor], calibration: Calibration, influence: dict[str, Tensor]
    ) -> None:
        """Fix every layer's count from one budget, by error curves on the dense network."""
        self.influence = influence
        for layer in layers:
            moments = calibration[layer.name]
            self.shared[layer.name] = moments, self._path(layer, self._problem(layer, dense[layer.name], moments))
        paths = {name: path for name, (_, path) in self.shared.items()}
        assert isinstance(self.target, Sparsity)
        self.counts = allocate(paths, self.target.count(sum(path.keys.numel() for path in paths.values())))

    def _problem(self, layer: Layer, dense: Tensor, moments: Moments) -> Problem:
        curvature = self.curvature.get(layer.name)
        return layer_problem(layer, dense, moments, prune_bias=self.prune_bias, damping=self.damping, curvature=curvature)

    def _path(self, layer: Layer, problem: Problem) -> DeletionPath:
        assert isinstance(self.solver, Exact)
        return self.solver.path(problem).weighted(self.influence[layer.name])

    def solve(self, layer: Layer, dense: Tensor, moments: Moments) -> Tensor:
        """Solve one layer and return its new matrix."""
        problem = self._problem(layer, dense, moments)
        began = time.perf_counter()
        target = for_layer(self.target, layer.name)
        if self.counts:
            seen, path = self.shared[layer.name]
            # Inputs that are still the dense network's need no second run.
            solution = (path if seen is moments else self._path(layer, problem)).cut(self.counts[layer.name])
        elif target is None:  # the user's mapping leaves this layer alone
            solution = solve(problem, "magnitude", 0.0)
        else:
            solution = solve(problem, self.solver, target)
        self.solutions[layer.name] = solution
        self.largest_errors[layer.name] = problem.largest_error_of(solution.weight)
        self.masks |= layer.masks(solution.mask)
        self.results[layer.name] = LayerResult(
            name=layer.name,
            shape=tuple(layer.weight.shape),
            kept=solution.kept,
            total=solution.prunable,
            error=solution.error,
            relative_error=solution.relative_error,
            damping=solution.damping,
            seconds=time.perf_counter() - began,
            samples=moments.count,
            sensitivity=_histogram(problem) if self.diagnostics else None,
        )
        return solution.weight


def _one_by_one(
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Mapping[str, Layer],
    dense: Mapping[str, Tensor],
    job: _Job,
    first: Calibration,
) -> Calibration:
    """Prune layers in the order they run, each on the inputs that the layers pruned before it produce.

    `first` is the dense network's calibration: good for the first layer, and it tells the order.
    """
    moments: dict[str, Moments] = {}
    for index, name in enumerate(first):
        layer = layers[name]
        moments[name] = (first if index == 0 else collect(pruned, batches, [layer]))[name]
        layer.write(job.solve(layer, dense[name], moments[name]))
    return Calibration(moments, first.samples, first.example, first.shapes)


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
