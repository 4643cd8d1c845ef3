"""A run: a copy of the network, pruned layer by layer, refitted and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs._system.run_log import log_event, phase
from lobs.calibration.batch_norm import BatchNormEffect, reestimate, statistics_of, take_up
from lobs.calibration.batches import Every, guarded
from lobs.calibration.blocks import Repeated, in_blocks, layers_of
from lobs.calibration.comparison import Comparison, LayerDistance, between
from lobs.calibration.layer_problem import asymmetric_problem, histogram, kept_share
from lobs.calibration.moments import PairedMoments
from lobs.certificate.bound import Certificate
from lobs.certificate.certify import certificate, layer_errors
from lobs.errors import LobsError
from lobs.layers import Layer, find_layers
from lobs.layers.untouched import copied
from lobs.pruning.finished import FinishedLayer, network_error
from lobs.pruning.refit.blocks import BlockRefit, BlockRefits, refit_block
from lobs.pruning.refit.exchange import exchange_in
from lobs.pruning.refit.gauss_newton import parameters_of
from lobs.pruning.refit.joint import JointRefit, refit_jointly
from lobs.pruning.refit.whole import refit_outputs
from lobs.pruning.result import LayerResult
from lobs.pruning.session import Session
from lobs.solvers import Auto, ColumnSweep, solve
from lobs.solvers.auto import before_refit
from lobs.solvers.problem import Problem
from lobs.solvers.solution import Solution, joined
from lobs.targets import Sparsity, Target

# Inputs of a large network, and vectors that reach each layer, on which the change is measured.
_MEASURED_SAMPLES, _MEASURED_VECTORS = 16, 64

Plan = Mapping[str, Target | None]
_MASK = "mask of "  # before a parameter's name in the run store


@dataclass
class Run:
    """One pruned network in the making.

    Args:
        session: what all runs share.
        plan: each layer's own target; None leaves a layer as it is.
        model: the copy that is pruned.
        number: which run of the session this is; part of the run store's keys.
        last: no allocation round follows, so a refit is due.
    """

    session: Session
    plan: Plan
    model: nn.Module
    number: int
    last: bool = True
    masks: dict[str, Tensor] = field(default_factory=dict)
    finished: dict[str, FinishedLayer] = field(default_factory=dict)
    norms: BatchNormEffect | None = None
    refit: JointRefit | BlockRefits | None = None
    comparison: Comparison | None = None  # None: not compared since the weights last changed

    def layers(self) -> dict[str, Layer]:
        """Return the layers of the pruned network by name."""
        return {layer.name: layer for layer in find_layers(self.model, self.session.options.names)}

    @property
    def draft(self) -> bool:
        """Return whether the run of a large network only serves to measure influences.

        Then layers are solved quickly, on the dense inputs whose moments are there already.
        """
        return not self.last and self.session.by_blocks

    def solve_layers(self) -> None:
        """Prune every layer: independently on dense inputs, or in the order they run."""
        if self.session.options.inputs == "dense" or self.draft:
            self._solve_independently()
        else:
            self._solve_in_order()

    def update_norms(self) -> None:
        """Re-estimate batch norms where that brings the output nearer to the dense one."""
        session, key = self.session, f"run {self.number} norms"
        saved = session.store.read(key)
        if saved is not None:
            self.norms = take_up(self.model, saved.state_dict, saved.record["effect"])
        elif self._any_removed():
            self.norms, self.comparison = reestimate(
                self.model, session.model, session.batches, self._new_comparison
            )
            effect = self.norms and asdict(self.norms)
            session.store.write(key, statistics_of(self.model), {"effect": effect})

    def refit_network(self) -> None:
        """Refit all surviving weights jointly where that brings the output nearer."""
        session, key, layers = self.session, f"run {self.number} refit", self.layers()
        chosen = [layers[name] for name, target in self.plan.items() if target is not None]
        names = {name for layer in chosen for name in layer.parameters()}
        parameters = parameters_of(self.model, names)
        saved = session.store.read(key)
        if saved is not None:
            self.refit = JointRefit(**saved.record["effect"])
            for name, parameter in parameters.items():
                parameter.data.copy_(saved.state_dict[name])
        elif self._any_removed():
            with phase("refit"):
                self.refit = refit_jointly(
                    self.model,
                    session.model,
                    session.batches,
                    chosen,
                    self.masks,
                    samples=session.calibration.samples,
                    madds=session.flops(),
                    work=session.options.refit_work,
                )
            tensors = {name: t.detach() for name, t in parameters.items()}
            session.store.write(key, tensors, {"effect": asdict(self.refit)})
        if self.refit is not None and self.refit.steps:
            self.comparison = None

    def refit_outputs(self) -> None:
        """Refit a network that was refitted by blocks once more, by its outputs."""
        session, key, layers = self.session, f"run {self.number} outputs", self.layers()
        chosen = [layers[name] for name, target in self.plan.items() if target is not None]
        saved = session.store.read(key)
        if saved is not None:
            effect = JointRefit(**saved.record["effect"])
            for name, tensor in saved.state_dict.items():
                self.model.get_parameter(name).data.copy_(tensor)
        else:
            with phase("refit"):
                effect = refit_outputs(
                    self.model, session.model, session.batches, chosen, self.masks
                )
            moved = self.model.named_parameters() if effect.steps else ()
            session.store.write(key, {n: p.detach() for n, p in moved}, {"effect": asdict(effect)})
        before = self.refit.blocks if isinstance(self.refit, BlockRefits) else ()
        self.refit = BlockRefits(before, effect) if before else effect
        self.comparison = None

    def compare(self) -> Comparison:
        """Return the distance from the dense network, measured once.

        For a large network, whose passes are dear, it is measured on some of the inputs.
        """
        if self.comparison is None:
            every, batches = self.measured_every, self.session.batches
            some = batches if every == 1 else Every(guarded(batches), every)
            self.comparison = self._new_comparison(every > 1).over(some)
        return self.comparison

    @property
    def measured_every(self) -> int:
        """Return which batches are compared: one in so many of a network refitted by blocks."""
        if not isinstance(self.refit, BlockRefits) or process_group().size > 1:
            return 1
        session, seen = self.session, self.session.calibration
        fewest = min((seen.count(x.name) for x in session.layers if not x.routed), default=0)
        return max(1, min(seen.samples // _MEASURED_SAMPLES, fewest // _MEASURED_VECTORS))

    def certify(self, held_out: Iterable[Any] | None) -> Certificate:
        """Return the bound beside the measured distance.

        With asymmetric inputs a layer's error is the measured distance between its outputs in the
        two networks. That includes errors of earlier layers that reach it.

        Args:
            held_out: other inputs to measure the distance on.
        """
        session, comparison = self.session, self.compare()
        calibration, inputs = session.calibration, session.options.inputs
        if inputs == "asymmetric":
            errors = {
                name: network_error(distance, comparison.samples)
                for name, distance in comparison.layers.items()
            }
            return certificate(comparison, calibration, errors, held_out=held_out, absorbed=True)
        largest = {name: done.largest_error for name, done in self.finished.items()}
        gains = None
        if inputs == "pruned":
            gains = {name: session.dense(name) for name in calibration}
        energies = {name: done.solution.energy for name, done in self.finished.items()}
        errors = layer_errors(largest, energies, calibration)
        return certificate(comparison, calibration, errors, held_out=held_out, dense_gains=gains)

    def results(self) -> tuple[LayerResult, ...]:
        """Return one line per layer."""
        layers, measured = self.layers(), self.compare().layers
        return tuple(
            self.finished[name].result(layers[name], measured.get(name))
            for name in self.session.options.names
        )

    def solutions(self) -> dict[str, Solution]:
        """Return the solution of each layer, as the network holds it now."""
        found = {name: done.solution for name, done in self.finished.items()}
        if self.refit is None or not self.refit.steps:
            return found
        layers, measured = self.layers(), self.compare().layers
        return {
            name: _refitted(solution, layers[name], measured.get(name), self.masks)
            for name, solution in found.items()
        }

    def removed(self) -> dict[str, int]:
        """Return how many weights of each layer are gone."""
        return {name: done.solution.removed for name, done in self.finished.items()}

    def rarely_used(self) -> dict[str, int]:
        """Return the experts that got fewer tokens than they have inputs, and how many they got."""
        seen = {name: done.samples for name, done in self.finished.items()}
        return {
            layer.name: seen[layer.name]
            for layer in self.session.layers
            if layer.routed and seen[layer.name] < layer.columns
        }

    def _solve_independently(self) -> None:
        session, layers = self.session, self.layers()
        session.gather()
        missing = [layers[name] for name in session.calibration if not self._known(layers[name])]
        ahead = session.distribute(
            missing,
            lambda layer: self._solved(layer, session.dense_problem(layer)),
            FinishedLayer.packed,
            lambda packed, layer: FinishedLayer.unpacked(packed, layer.weight),
            "prune",
        )
        with track("prune", len(layers)) as advance:
            for name in session.calibration:
                self._finish(layers[name], ahead)
                advance(1)

    def _solve_in_order(self) -> None:
        session, layers = self.session, self.layers()
        order = [name for name in session.calibration if self.plan[name] is not None]
        pairs = [(session.by_name[name], layers[name]) for name in order]
        known = [layer.name for layer, _ in pairs if self._known(layer)]
        by_blocks = self.last and session.by_blocks
        refits: list[BlockRefit] = []
        vectors = {name: session.calibration.count(name) for name in order} if by_blocks else None
        for block in in_blocks(
            session.model,
            self.model,
            session.batches,
            pairs,
            repeated=by_blocks,
            vectors=vectors,
        ):
            refitted = by_blocks and isinstance(block, Repeated)
            for layer, moments in layers_of(block, known):
                self._finish(layer, _once(lambda: self._solved_on(layer, moments, refitted)))  # noqa: B023
            if refitted and isinstance(block, Repeated) and block.layers:
                refits.append(self._refit_block(block))
        if refits:
            self.refit = BlockRefits(tuple(refits))
        for name in session.calibration:
            if self.plan[name] is None:
                problem = session.dense_problem(layers[name])
                self._finish(layers[name], _once(lambda: self._solved(layers[name], problem)))  # noqa: B023

    def _refit_block(self, block: Repeated) -> BlockRefit:
        """Refit one block whose layers are solved, or take the weights from the run store."""
        session, key = self.session, f"run {self.number} block {block.name}"
        saved = session.store.read(key)
        parameters = dict(block.module.named_parameters())
        if saved is not None:
            for name, tensor in saved.state_dict.items():
                if name.startswith(_MASK):
                    self.masks[name.removeprefix(_MASK)] = tensor.to(torch.bool)
                else:
                    parameters[name].data.copy_(tensor)
            return BlockRefit(**saved.record["effect"])
        layers = [after for _, after in block.layers]
        shared = self._shared_by(block)
        solver = session.options.solver
        exchange = exchange_in(block.name, layers, self.plan, solver, self.masks, shared)
        effect = refit_block(block, layers, self.masks, shared, exchange)
        log_event("block", **asdict(effect))
        tensors = {n: p.detach() for n, p in parameters.items()} if effect.moved else {}
        if effect.moved:
            self.masks |= exchange.masks
            tensors |= {f"{_MASK}{n}": m.to(torch.uint8) for n, m in exchange.masks.items()}
        session.store.write(key, tensors, {"effect": asdict(effect)})
        return effect

    def _shared_by(self, block: Repeated) -> set[str]:
        """Return names of a block's parameters that the network also uses outside the block."""
        every = list(self.model.named_parameters(remove_duplicate=False))
        outside = {id(p) for name, p in every if not name.startswith(f"{block.name}.")}
        return {name for name, p in block.module.named_parameters() if id(p) in outside}

    def _solved_on(
        self, layer: Layer, moments: PairedMoments | None, refitted: bool
    ) -> FinishedLayer:
        """Solve one layer on the inputs that the pruned layers before it give.

        Args:
            layer: the layer.
            moments: the moments of its inputs.
            refitted: its block is refitted afterwards.
        """
        assert moments is not None  # only layers in the run store come without
        session = self.session
        asymmetric = session.options.inputs == "asymmetric"
        aim = moments.aim(session.dense(layer.name)) if asymmetric else None
        if moments.pruned.count:
            problem = session.problem(layer, moments.pruned, overwrite=True)
        else:  # an expert that gets no token any more
            problem = session.dense_problem(layer)
        if aim is not None:
            kept = kept_share(self.plan[layer.name], problem)
            problem = asymmetric_problem(problem, *aim, kept)
        done = self._solved(layer, problem, refitted)
        group = process_group()
        if group.size == 1:
            return done
        # All processes solved the same problem. The leader's bits are taken by all.
        return FinishedLayer.unpacked(group.broadcast_object(*done.packed()), layer.weight)

    def _solved(self, layer: Layer, problem: Problem, refitted: bool = False) -> FinishedLayer:
        session, target = self.session, self.plan[layer.name]
        options = session.options
        began = time.perf_counter()
        with phase("solve", layer=layer.name):
            if target is None:  # it stays as it is, to the bit
                dense = session.dense(layer.name)
                solution = replace(solve(problem, "magnitude", keep=1.0), weight=dense, error=0.0)
            else:
                solver = options.solver
                if self.draft and isinstance(solver, Auto) and isinstance(target, Sparsity):
                    solver = ColumnSweep(exact=False)
                elif refitted:
                    solver = before_refit(solver)
                solution = solve(problem, solver, target)
        return FinishedLayer(
            solution,
            solution.error + problem.hidden_error_of(solution.weight),
            time.perf_counter() - began,
            problem.samples or 0,
            histogram(problem) if options.execution.diagnostics else None,
        )

    def _finish(self, layer: Layer, solved: Iterator[FinishedLayer]) -> None:
        """Write one layer into the network, from the run store or as it is solved now."""
        store, key = self.session.store, self._key(layer)
        saved = store.read(key)
        if saved is None:
            done = next(solved)
            if store.kept:
                store.write(key, *done.packed())
        else:
            done = FinishedLayer.unpacked((saved.state_dict, saved.record), layer.weight)
        solution = done.solution
        log_event(
            "layer",
            layer=layer.name,
            kept=solution.kept,
            error=solution.error,
            found_done=saved is not None,
        )
        layer.write(solution.weight)
        self.masks = joined(self.masks, layer.masks(solution.mask))
        self.finished[layer.name] = done if memory.limit() is None else done.without_tensors()

    def _known(self, layer: Layer) -> bool:
        return self.session.store.has(self._key(layer))

    def _key(self, layer: Layer) -> str:
        return f"run {self.number} layer {layer.name}"

    def _any_removed(self) -> bool:
        return any(self.removed().values())

    def _new_comparison(self, partly: bool = False) -> Comparison:
        """Return an empty comparison of the networks and of their layers.

        Args:
            partly: it will see a part of the data.
        """
        session, layers = self.session, self.layers()
        samples = None if partly else session.calibration.samples
        pairs = [(x, layers[x.name]) for x in session.layers if not x.routed]
        return between(session.model, self.model, pairs, session.options.inputs, samples)


def start_run(session: Session, plan: Plan, *, last: bool = True) -> Run:
    """Prune a copy of the session's network by a plan, and return the run.

    Args:
        session: what all runs share.
        plan: each layer's own target.
        last: no allocation round follows, so a refit is due.
    """
    session.runs += 1
    run = Run(session, plan, _copied(session.model, session.layers), session.runs, last)
    run.solve_layers()
    moved = isinstance(run.refit, BlockRefits) and run.refit.steps
    if session.options.numerics.batch_norm and not (run.draft or moved):
        run.update_norms()  # refitted blocks have moved their norms' gains and biases already
    if last and session.refit == "network" and session.by_blocks:
        run.refit_outputs()
    elif last and session.refit != "layers" and run.refit is None:
        run.refit_network()  # also where no blocks were found: the network is one block
    return run


def run_rounds(session: Session) -> Run:
    """Prune in as many allocation rounds as the target asks for, and return the last run."""
    rounds = session.options.rounds if session.options.shared else 1
    run = start_run(session, session.plan(), last=rounds == 1)
    for number in range(2, rounds + 1):
        session.refresh_influence(run.model)
        run = start_run(session, session.plan(), last=number == rounds)
    return run


def _once(compute: Callable[[], FinishedLayer]) -> Iterator[FinishedLayer]:
    yield compute()


def _refitted(
    solution: Solution,
    layer: Layer,
    measured: LayerDistance | None,
    masks: Mapping[str, Tensor],
) -> Solution:
    """Return a solution with the mask, weights and errors that the refit left.

    An expert's error is that of its solution: it has other inputs in each network.

    Args:
        solution: the layer's own solution.
        layer: the layer in the pruned network.
        measured: the distance between its outputs in the two networks.
        masks: True where a weight is kept, by parameter name.
    """
    part, mask = layer.weight_part, solution.mask
    whole = masks.get(f"{layer.prefix}{part.key}")
    if whole is not None and mask.numel():
        rows = whole[part.start : part.stop].view(layer.weight.shape)
        kept = layer.unfolded(rows).to(mask)
        mask = mask.clone()
        mask.view(*kept.shape[:2], -1)[..., : layer.columns] = kept
    done = replace(solution, weight=layer.matrix(), mask=mask, curve=None)
    if measured is None:
        return done
    return replace(done, error=measured.mean_error, energy=measured.mean_energy)


def _copied(model: nn.Module, layers: Iterable[Layer]) -> nn.Module:
    """Return a copy to prune; refuse one whose replaced forward would run pruned layers of ours."""
    pruned = {layer.owner for layer in layers}
    for name, module in model.named_modules():
        patch = vars(module).get("forward")
        cells = getattr(patch, "__closure__", None) or ()
        seen = [getattr(cell.cell_contents, "__self__", cell.cell_contents) for cell in cells]
        if any(pruned & set(x.modules()) for x in seen if isinstance(x, nn.Module)):
            raise LobsError(
                f"the forward pass of '{name}' was replaced by a function that calls this very "
                "network, so a copy would run the original. Write a subclass with that forward."
            )
    try:
        return copied(model)
    except Exception as error:  # a network may hold locks, open files, tensors with a history
        text = " ".join(str(error).split())
        raise LobsError(
            f"the network cannot be copied ({type(error).__name__}: {text}), and solving happens "
            "on a copy. Remove from it everything but modules, parameters and plain values."
        ) from error
