"""A network, its data and how it is to be pruned: what all plans for it and all runs of a plan share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from lobs.pruning import feasibility

from lobs._system import memory
from lobs.pruning.plan import Curve, RowLosses, allocate, row_losses
from lobs.calibration.layer_problem import layer_problem
from lobs.calibration.collect import Calibration, collect_moments
from lobs.pruning.refit.joint import Compensate
from lobs.calibration.fisher import fisher_diagonal
from lobs._system.distributed import SINGLE_PROCESS, process_group, use_group
from lobs.calibration.on_demand import Gathered, gathered
from lobs.calibration.output_influence import output_influence
from lobs.storage.run_store import RunStore
from lobs.layers import Layer, find_layers
from lobs.pruning.preview import BudgetPreview, preview_budgets
from lobs.solvers.problem import Problem, Solver, check_finite
from lobs._system.progress import track
from lobs.calibration.moments import Moments
from lobs.targets import Budget, Sparsity, Structured, Target, for_layer, removable

Inputs: TypeAlias = Literal["dense", "pruned", "asymmetric"]
Packed: TypeAlias = tuple[dict[str, Tensor], Any]


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
        run_store: RunStore | None = None,
        gather: bool = False,
        room: float | None = None,
        compensate: Compensate = "layers",
        work: float | None = None,
    ) -> None:
        self.model, self.batches, self.layers, self.solver, self.inputs = (
            model,
            batches,
            layers,
            solver,
            inputs,
        )
        self.prune_bias, self.damping, self.diagnostics, self.batch_norm = (
            prune_bias,
            damping,
            diagnostics,
            batch_norm,
        )
        self.compensate, self.work = compensate, work
        self.run_store = run_store or RunStore()
        self.runs = self.looks = 0
        self._mine = {layer.name: layer for layer in layers}
        for layer in layers:
            check_finite(f"layer '{layer.name}'", "weight", layer.matrix())
        if gather:  # moments when they are wanted, in passes of `room` bytes
            self.calibration: Calibration = gathered(model, batches, layers, self.run_store, room)
        else:
            self.calibration = collect_moments(model, batches, layers, run_store=self.run_store)
        self.curvature: dict[str, Tensor] = {}
        if "curvature" in solver.needs:
            self.curvature = self._once(
                "curvature", lambda: fisher_diagonal(model, batches, layers)
            )
        self.influence: dict[str, Tensor] = {}
        self._losses: dict[str, RowLosses] = {}
        self._sharing: tuple[Sparsity | Budget, Mapping[str, float] | None] | None = None

    @cached_property
    def prunable(self) -> dict[str, int]:
        """How many weights of each layer may go."""
        return feasibility.prunable(self.layers, self.prune_bias)

    def dense(self, name: str) -> Tensor:
        """A layer's weights as they were given."""
        return self._mine[name].matrix()

    def problem(self, layer: Layer, moments: Moments, *, overwrite: bool = False) -> Problem:
        """One layer's problem on some inputs, whose moments may be used up if they are `mine`."""
        return layer_problem(
            layer,
            self.dense(layer.name),
            moments,
            prune_bias=self.prune_bias,
            damping=self.damping,
            row_weight=self.influence.get(layer.name),
            curvature=self.curvature.get(layer.name),
            overwrite=overwrite,
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
                return self.shared(
                    target,
                    max(0.0, feasibility.stored_bytes(self.model, self.prunable) - size),
                    self._bytes_each(),
                )
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
        return {
            name: Sparsity(count / max(1, self.prunable[name]), scope="layer")
            for name, count in counts.items()
        }

    def _curves(
        self, target: Sparsity | Budget, prices: Mapping[str, float] | None
    ) -> dict[str, Curve]:
        curves = {}
        for layer in self.layers:
            n = self.prunable[layer.name]
            limits = removable(target, layer.name, n)
            price = 1.0 if prices is None else prices[layer.name]
            curves[layer.name] = self._losses[layer.name].curve(
                n, self.influence[layer.name], *limits, price
            )
        return curves

    def preview(self, removed: Mapping[str, int]) -> BudgetPreview | None:
        """What other budgets would have asked of the layers, where one budget was shared out; no further pruning."""
        if self._sharing is None:
            return None
        return preview_budgets(self._curves(*self._sharing), self._losses, self.influence, removed)

    def _measure(self) -> None:
        self.influence = self._influence(self.model, self.layers)
        self.gather()
        missing = [
            layer for layer in self.layers if not self.run_store.has(f"curve of {layer.name}")
        ]
        ahead = self.apart(
            missing,
            lambda layer: (row_losses(self.dense_problem(layer)).packed(), None),
            "error curves",
        )
        with track("error curves", len(self.layers)) as advance:
            for layer in self.layers:
                found = self._once(f"curve of {layer.name}", lambda: next(ahead)[0])
                self._losses[layer.name] = RowLosses.unpacked(found)
                advance(1)

    def apart(
        self, layers: Sequence[Layer], work: Callable[[Layer], Packed], label: str
    ) -> Iterator[Packed]:
        """Do independent work on layers, each by one process of the crew; gives all of it to all, in order."""
        group = process_group()
        if group.size == 1:
            yield from map(work, layers)
            return
        owners = group.owners([layer.weight.numel() * float(layer.columns) for layer in layers])
        mine: dict[str, Packed] = {}
        with (
            group.raise_together(),
            use_group(SINGLE_PROCESS),
            track(label, owners.count(group.rank)) as advance,
        ):
            for layer, owner in zip(layers, owners, strict=True):
                if owner == group.rank:
                    mine[layer.name] = work(layer)
                    advance(1)
        for layer, owner in zip(layers, owners, strict=True):
            yield group.broadcast_object(*mine.get(layer.name, (None, None)), by=owner)

    def _influence(self, model: nn.Module, layers: list[Layer]) -> dict[str, Tensor]:
        self.looks += 1
        skipped = (
            self.calibration.drawn_elsewhere(process_group().rank)
            if process_group().size > 1
            else ()
        )
        compute = partial(output_influence, model, self.batches, layers, skipped=skipped)
        return self._once(f"influence {self.looks}", compute)

    def _once(self, key: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Some tensors by name: those in the run store, or computed now and put there."""
        found = self.run_store.read(key)
        if found is not None:
            return dict(found.state_dict)
        tensors = compute()
        self.run_store.write(key, tensors, {})
        return tensors

    def look_again(self, pruned: nn.Module) -> None:
        """Let a pruned network say how much each unit matters: at high sparsity that is no longer what the dense one says."""
        layers = find_layers(pruned, [layer.name for layer in self.layers])
        self.influence = self._influence(pruned, layers)

    def _bytes_each(self) -> dict[str, float]:
        return {layer.name: float(layer.weight.element_size()) for layer in self.layers}

    def _flops_each(self) -> dict[str, float]:
        seen, samples = self.calibration, self.calibration.samples
        return {
            layer.name: 2 * seen.count(layer.name) / samples * layer.uses_per_patch
            for layer in self.layers
        }

    @property
    def madds(self) -> float:
        """Multiply-adds of all layers for one sample."""
        each = self._flops_each()
        return sum(each[layer.name] / 2 * layer.weight.numel() for layer in self.layers)

    def gather(self) -> None:
        """All processes together, before each works on layers of its own."""
        if isinstance(self.calibration, Gathered):
            self.calibration.prepare()

    def dense_problem(self, layer: Layer) -> Problem:
        """One layer's problem on what the dense network feeds it."""
        # With a limit of memory every look at the moments reads them anew, so that they may be used
        # up.
        return self.problem(
            layer, self.calibration[layer.name], overwrite=memory.limit() is not None
        )
