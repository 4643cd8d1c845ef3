"""A session: one network, its data and options, and everything that all its runs share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lobs._system import memory
from lobs._system.distributed import SINGLE_PROCESS, process_group, use_group
from lobs._system.progress import track
from lobs.calibration.collect import Calibration, collect_moments, never_reached
from lobs.calibration.fisher import fisher_diagonal
from lobs.calibration.forward import learn, length
from lobs.calibration.layer_problem import layer_problem
from lobs.calibration.moments import Moments
from lobs.calibration.on_demand import Gathered, gathered
from lobs.calibration.output_influence import INFLUENCE_SAMPLES, output_influence
from lobs.errors import CalibrationError, caution
from lobs.layers import Layer, find_layers
from lobs.layers.uses import learnt
from lobs.pruning import feasibility
from lobs.pruning.coupled import coupled_plan
from lobs.pruning.feasibility import Coverage, coverage
from lobs.pruning.finished import Packed
from lobs.pruning.latency import Timing, counts_in_time, start_timing
from lobs.pruning.options import Options
from lobs.pruning.plan import Curve, RowLosses, allocate, row_losses, with_floors
from lobs.pruning.preview import BudgetPreview, preview_budgets
from lobs.pruning.refit.joint import WORK, Refit, affordable
from lobs.solvers.problem import Problem
from lobs.storage.run_store import RunStore
from lobs.targets import Budget, Pattern, Sparsity, Target, for_layer, removable

_CURVE_VECTORS = 16  # input vectors for every column that error curves of a large network need
_TINY = 1e-30  # least energy of a layer's output

T = TypeVar("T")


@dataclass
class Session:
    """What all runs of one network share. Everything is computed when it is first asked for.

    Args:
        model: the dense network.
        batches: the calibration data.
        options: the checked options.
        store: where finished work is stored and found again.
        pass_bytes: memory for the moments of one pass over the data; None without a limit.
        choosing: inputs that choose among runs, and take part in none of them.
    """

    model: nn.Module
    batches: Iterable[Any]
    options: Options
    store: RunStore = field(default_factory=RunStore)
    pass_bytes: float | None = None
    choosing: Iterable[Any] | None = None
    runs: int = 0
    calibration_key: str = "calibration"
    influence: dict[str, Tensor] = field(default_factory=dict)
    timing: Timing | None = None  # of a budget in time, on the leading process
    _influences: int = 0
    _losses: dict[str, RowLosses] = field(default_factory=dict)
    _sharing: tuple[Sparsity | Budget, Mapping[str, float] | None] | None = None

    def with_options(self, options: Options) -> Session:
        """Return a session for another target that shares this one's moments and error curves.

        Its runs are not stored: they would be confused with this session's.
        """
        other = Session(self.model, self.batches, options, pass_bytes=self.pass_bytes)
        other.calibration = self.calibration
        if options.shared:
            if not self._losses:
                self._measure_curves()
            other.influence, other._losses = self.influence, self._losses
        return other

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers to prune."""
        return self.options.layers

    @cached_property
    def calibration(self) -> Calibration:
        """Return the moments of every layer's dense inputs.

        With limited memory they are collected in several passes, when they are needed. Likewise
        where no budget is shared by error curves: then they may never be needed.
        """
        options = self.options
        images = any(layer.positions > 1 for layer in self.layers)  # which give many windows
        late = not (options.inputs == "dense" or options.shared)
        if late or options.execution.memory is not None:
            return gathered(
                self.model,
                self.batches,
                list(self.layers),
                self.store,
                self.pass_bytes,
                key=self.calibration_key,
                every=sys.maxsize if late and self._large else 1,
            )
        return collect_moments(
            self.model,
            self.batches,
            list(self.layers),
            run_store=self.store,
            key=self.calibration_key,
            required=False,
            enough=_CURVE_VECTORS if images and self._large else None,
        )

    @cached_property
    def _large(self) -> bool:
        """Return whether the network will be refitted by blocks, as one batch tells.

        Then every layer's inputs are summed anew, block by block. The moments of the first pass
        serve its error curves alone.
        """
        options, layers = self.options, self.layers
        lengths = process_group().all_gather(length(self.batches))
        if options.inputs == "dense" or options.refit == "layers" or None in lengths:
            return False
        first = list(islice(self.batches, 1))
        try:
            seen = collect_moments(
                self.model, first, list(layers), counts_only=True, required=False
            )
        except CalibrationError:  # empty first batches; the whole pass will say what is wrong
            return False
        samples = seen.samples * sum(lengths) // len(lengths)
        return not affordable(_madds(layers, seen), samples, WORK)

    def leave_unreached(self) -> None:
        """Leave layers that no batch reaches as they are; refuse them where they were named."""
        missing = self._unreached()
        if missing and learnt(self.model) is None:  # another module may use their weights
            learn(self.model, self.batches, always=True)
            self.options = self.options.looked_up_again(self.model)
            self.calibration_key = "calibration again"
            del self.calibration
            missing = self._unreached()
        seen = self.calibration
        if not missing:
            return
        if self.options.named or len(missing) == len(self.layers):
            raise never_reached(missing)
        self.options = self.options.without(dict.fromkeys(missing, "no batch runs it"))
        reached = {name: m for name, m in seen.moments.items() if name not in missing}
        self.calibration = replace(seen, moments=reached)

    def _unreached(self) -> list[str]:
        seen = self.calibration
        return [
            layer.name
            for layer in self.layers
            if layer.name not in seen.moments or (layer.routed and not seen.count(layer.name))
        ]

    @cached_property
    def coverage(self) -> Coverage:
        """Return how much of the network is to be pruned, and what stays dense."""
        return coverage(self.model, self.layers, self.options.left)

    @cached_property
    def refit(self) -> Refit:
        """Return what is refitted: as asked, or the network if that is cheap, or else blocks."""
        asked = self.options.refit
        return asked if asked is not None else "network" if self.small else "blocks"

    @property
    def by_blocks(self) -> bool:
        """Return whether blocks are refitted: as asked, or because the network is large."""
        return self.refit == "blocks" or (self.refit == "network" and not self.small)

    @cached_property
    def small(self) -> bool:
        """Return whether Gauss–Newton steps on the whole network take about 20 s or less."""
        return affordable(self.flops(), self.calibration.samples, WORK)

    @cached_property
    def curvature(self) -> dict[str, Tensor]:
        """Return the loss's diagonal curvature by layer, for solvers that need it."""
        if "curvature" not in self.options.solver.needs:
            return {}
        return self._stored(
            "curvature", lambda: fisher_diagonal(self.model, self.batches, list(self.layers))
        )

    @cached_property
    def prunable(self) -> dict[str, int]:
        """Return how many weights of each layer may be removed."""
        return feasibility.prunable(self.layers, self.options.numerics.prune_bias)

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        """Return the dense network's layers by name."""
        return {layer.name: layer for layer in self.layers}

    def dense(self, name: str) -> Tensor:
        """Return a layer's dense weights as a matrix."""
        return self.by_name[name].matrix()

    def problem(self, layer: Layer, moments: Moments, *, overwrite: bool = False) -> Problem:
        """Build one layer's problem.

        Args:
            layer: the layer.
            moments: the moments of its inputs.
            overwrite: let the problem reuse the moments' memory.
        """
        numerics = self.options.numerics
        return layer_problem(
            layer,
            self.dense(layer.name),
            moments,
            prune_bias=numerics.prune_bias,
            damping=numerics.damping,
            row_weight=self.influence.get(layer.name),
            curvature=self.curvature.get(layer.name),
            overwrite=overwrite,
        )

    def dense_problem(self, layer: Layer) -> Problem:
        """Build one layer's problem on the dense network's inputs."""
        # With limited memory the moments are read again each time, so their memory can be reused.
        limited = memory.limit() is not None
        return self.problem(layer, self.calibration[layer.name], overwrite=limited)

    def plan(self) -> dict[str, Target | None]:
        """Return each layer's own target. A shared budget is allocated by the error curves."""
        target = self.options.target
        total = sum(self.prunable.values())
        match target:
            case Sparsity(scope="network"):
                return self.allocated(target, target.count(total))
            case Budget(parameters=int() | float() as kept):
                return self.allocated(target, max(0.0, total - kept))
            case Budget(bytes=int() | float() as size):
                room = feasibility.header_room(size, self.model, self.layers, target, self.prunable)
                spare = feasibility.stored_bytes(self.model, self.prunable) + room - size
                return self.allocated(target, max(0.0, spare), self._bytes_each())
            case Budget(flops=int() | float() as flops):
                uses = self._flops_each()
                spent = sum(uses[name] * n for name, n in self.prunable.items())
                return self.allocated(target, max(0.0, spent - flops), uses)
            case Budget(timed=True):
                return self.allocated_in_time(target)
            case Pattern() if target.coupled and (plan := coupled_plan(self, target)) is not None:
                return plan
            case Pattern():
                target = target.inside(list(self.calibration))
                feasibility.check_pattern(target, self.layers)
        return {layer.name: for_layer(target, layer.name) for layer in self.layers}

    def allocated(
        self, target: Sparsity | Budget, give: float, prices: Mapping[str, float] | None = None
    ) -> dict[str, Target | None]:
        """Return every layer's count from one budget, by error curves on the dense network.

        Args:
            target: the budget, for its limits by layer.
            give: how much has to go, in weights or in units of the prices.
            prices: what one weight of each layer counts for; 1 by default.
        """
        if not self._losses:
            self._measure_curves()
        self._sharing = target, prices
        return self._fractions(allocate(self._curves(target, prices), give))

    def _fractions(self, counts: Mapping[str, int]) -> dict[str, Target | None]:
        return {
            name: Sparsity(count / max(1, self.prunable[name]), scope="layer")
            for name, count in counts.items()
        }

    def allocated_in_time(self, target: Budget) -> dict[str, Target | None]:
        """Return every layer's count from a budget in time; the leader's clock decides.

        Args:
            target: a budget with `latency` or `speedup`.
        """
        if not self._losses:
            self._measure_curves()
        self._sharing, counts = (target, None), {}
        key, group = f"time plan {self.runs}", process_group()
        saved = self.store.read(key)  # a clock never gives the same plan again
        if saved is not None:
            return self._fractions(saved.record["counts"])
        with group.raise_together():
            if group.leads:
                if self.timing is None:
                    self.timing = start_timing(self.model, self.layers, self.batches, target)
                curves = self._curves(target, None)
                counts = counts_in_time(self.model, self.by_name, curves, self.timing)
        _, counts = group.broadcast_object({}, counts)
        self.store.write(key, {}, {"counts": counts})
        return self._fractions(counts)

    def refresh_influence(self, pruned: nn.Module) -> None:
        """Take output sensitivities from a pruned network: at high sparsity they have changed."""
        self.influence = self._output_influence(pruned, find_layers(pruned, self.options.names))

    def preview(self, removed: Mapping[str, int]) -> BudgetPreview | None:
        """Return what other budgets would take from the layers; None without a shared budget."""
        if self._sharing is None:
            return None
        curves = self._curves(*self._sharing)
        return preview_budgets(curves, self._losses, self.influence, removed)

    def gather(self) -> None:
        """Compute what needs all processes, before each works on layers of its own."""
        _ = self.curvature
        if isinstance(self.calibration, Gathered):
            self.calibration.prepare()

    def distribute(
        self,
        layers: Sequence[Layer],
        work: Callable[[Layer], T],
        pack: Callable[[T], Packed],
        unpack: Callable[[Packed, Layer], T],
        label: str,
    ) -> Iterator[T]:
        """Do independent work on layers, each in one process, and yield all results in order.

        Args:
            layers: the layers.
            work: what is done with each.
            pack: turns a result into tensors and a record, to send it.
            unpack: restores a result that another process sent.
            label: what the progress bar says.
        """
        group = process_group()
        if group.size == 1:
            yield from map(work, layers)
            return
        owners = group.owners([layer.weight.numel() * float(layer.columns) for layer in layers])
        own: dict[str, Packed] = {}
        with (
            group.raise_together(),
            use_group(SINGLE_PROCESS),
            track(label, owners.count(group.rank)) as advance,
        ):
            for layer, owner in zip(layers, owners, strict=True):
                if owner == group.rank:
                    own[layer.name] = pack(work(layer))
                    advance(1)
        for layer, owner in zip(layers, owners, strict=True):
            packed = group.broadcast_object(*own.get(layer.name, (None, None)), by=owner)
            yield unpack(packed, layer)

    def flops(self) -> float:
        """Return the multiply-adds of all layers for one sample."""
        return _madds(self.layers, self.calibration)

    def _curves(
        self, target: Sparsity | Budget, prices: Mapping[str, float] | None
    ) -> dict[str, Curve]:
        curves = {}
        for layer in self.layers:
            n = self.prunable[layer.name]
            limits = removable(target, layer.name, n)
            price = 1.0 if prices is None else prices[layer.name]
            losses = self._losses[layer.name]
            curves[layer.name] = losses.curve(n, self.influence[layer.name], *limits, price)
        return with_floors(curves)

    def _measure_curves(self) -> None:
        self.influence = self._output_influence(self.model, list(self.layers))
        self.gather()
        missing = [layer for layer in self.layers if not self.store.has(_curve_key(layer))]
        ahead = self.distribute(
            missing,
            lambda layer: row_losses(self.dense_problem(layer)),
            lambda losses: (losses.packed(), None),
            lambda packed, _: RowLosses.unpacked(packed[0]),
            "error curves",
        )
        with track("error curves", len(self.layers)) as advance:
            for layer in self.layers:
                found = self.store.read(_curve_key(layer))
                if found is None:
                    losses = next(ahead)
                    self.store.write(_curve_key(layer), losses.packed(), {})
                else:
                    losses = RowLosses.unpacked(found.state_dict)
                self._losses[layer.name] = losses
                advance(1)

    def _output_influence(self, model: nn.Module, layers: list[Layer]) -> dict[str, Tensor]:
        self._influences += 1
        group = process_group()
        seen = self.calibration
        skipped = seen.drawn_elsewhere(group.rank) if group.size > 1 else ()
        every = max(1, seen.samples // INFLUENCE_SAMPLES) if self.by_blocks else 1
        return self._stored(
            f"influence {self._influences}",
            lambda: self._or_alike(
                output_influence(model, self.batches, layers, skipped=skipped, every=every)
            ),
        )

    def _or_alike(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return influences, or where there are none at all, such that relative errors count."""
        if any(bool(value.any()) for value in found.values()):
            return found
        caution(
            "the network's outputs have no gradient, such as whole numbers or none at all: errors "
            "count relative to each layer's own output."
        )
        energies = {name: self.dense_problem(self.by_name[name]).energy for name in found}
        return {n: torch.full_like(x, 1 / max(energies[n], _TINY)) for n, x in found.items()}

    def _stored(self, key: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors from the run store, or compute them now and store them."""
        found = self.store.read(key)
        if found is not None:
            return dict(found.state_dict)
        tensors = compute()
        self.store.write(key, tensors, {})
        return tensors

    def _bytes_each(self) -> dict[str, float]:
        return {layer.name: float(layer.weight.element_size()) for layer in self.layers}

    def _flops_each(self) -> dict[str, float]:
        seen, samples = self.calibration, self.calibration.samples
        return {
            layer.name: 2 * seen.count(layer.name) / samples * layer.uses_per_patch
            for layer in self.layers
        }


def _madds(layers: Sequence[Layer], seen: Calibration) -> float:
    """Return the multiply-adds of all layers that data reached, for one sample."""
    samples = max(1, seen.samples)
    return sum(
        seen.count(layer.name) / samples * layer.uses_per_patch * layer.weight.numel()
        for layer in layers
        if layer.name in seen.moments
    )


def _curve_key(layer: Layer) -> str:
    return f"curve of {layer.name}"
