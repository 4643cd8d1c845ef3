"""Predict what a run takes before it is run: passes over the data, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lobs._system import context, memory
from lobs._system.distributed import process_group
from lobs._system.memory import spelled
from lobs.calibration.batch_norm import find_norms
from lobs.calibration.blocks import candidates
from lobs.calibration.on_demand import moment_bytes, passes
from lobs.calibration.output_influence import INFLUENCE_SAMPLES
from lobs.errors import LobsError
from lobs.layers import Layer
from lobs.pruning.probe import Probe, probed
from lobs.pruning.refit.blocks import SCHEDULE as BLOCKS
from lobs.pruning.refit.blocks import WORK_BYTES
from lobs.pruning.refit.gauss_newton import PASSES
from lobs.pruning.refit.joint import WORK, Refit, affordable, effort
from lobs.pruning.refit.split import SMALL
from lobs.pruning.refit.whole import SCHEDULE as WHOLE
from lobs.solvers.auto import before_refit, bytes_of, seconds_of
from lobs.solvers.costs import COSTS, ProblemShape
from lobs.solvers.problem import Solver
from lobs.targets import Sparsity, Target, for_layer

_ROWS = 2**28  # bytes of the rows that are processed together
_SLACK = 1.02  # relative error of a forecast of memory
_MARGIN = 1.03  # factor on the memory that a message recommends
_CALL = 2e-4  # seconds that a call of a small network takes, whatever it computes
_MODULE = 5e-5  # seconds that a call of one module takes
_KEPT = 0.1  # kept share of a layer that is assumed where the target does not set it


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Args:
        name: what the stage does.
        passes: how often a network goes through the data.
        seconds: how long that and the work after it take.
    """

    name: str
    passes: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Args:
        limit: the memory limit in bytes; None without one.
        room: bytes for the moments of one pass; None without a limit.
        fixed: bytes in use now, of the network's copy, and of a batch's activations.
        peak: bytes at the peak.
        spilled: bytes of moments that go to temporary files.
        widest: the layer that takes most memory.
        widest_bytes: bytes that this layer takes.
        groups: names of the layers whose moments are collected in one pass.
        stages: the parts of the run in order.
    """

    limit: int | None
    room: float | None
    fixed: int
    peak: int
    spilled: int
    widest: str
    widest_bytes: int
    groups: tuple[tuple[str, ...], ...]
    stages: tuple[Stage, ...]

    @property
    def passes(self) -> int:
        """Number of times that a network goes through the data."""
        return sum(stage.passes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Estimated seconds of all stages on two cores."""
        return sum(stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        rows = [(stage.name, stage.passes, stage.seconds) for stage in self.stages]
        rows.append(("in all", self.passes, self.seconds))
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'phase':<{width}}  passes over the data  about seconds"]
        lines += [f"{name:<{width}}  {n:>20,}  {took:>13,.1f}" for name, n, took in rows]
        held = f"; {spelled(self.spilled)} of moments go to temporary files" if self.spilled else ""
        promised = "" if self.limit is None else f" of {spelled(self.limit)}"
        lines.append(
            f"memory: about {spelled(self.peak)}{promised}: {spelled(self.fixed)} for this process "
            f"and the network's copy, {spelled(self.widest_bytes)} for layer "
            f"'{self.widest}'{held}"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary, for JSON."""
        return {**asdict(self), "passes": self.passes, "seconds": self.seconds}


@dataclass(frozen=True)
class Workload:
    """What a run does, as far as its cost depends on it.

    Args:
        target: what is asked of the layers.
        inputs: "dense", "pruned" or "asymmetric".
        shared: one budget is allocated among the layers by error curves.
        rounds: number of allocation rounds.
        looks: how often output influence is measured; None for once per round.
        damped: the caller chose the damping.
        batch_norm: batch-norm statistics are estimated anew.
        refit: how far weights are refitted.
        refit_work: multiply-adds that the joint refit may take; None for no limit.
    """

    target: Target
    inputs: str
    shared: bool
    rounds: int
    looks: int | None = None
    damped: bool = False
    batch_norm: bool = True
    refit: Refit | None = "layers"
    refit_work: float | None = None

    @property
    def sequential(self) -> bool:
        """Whether layers are solved in order, on two streams of activations."""
        return self.inputs != "dense"

    @property
    def runs(self) -> int:
        """How often all layers are solved."""
        return self.rounds if self.shared else 1


def forecast(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    solver: Solver,
    load: Workload,
) -> Forecast:
    """Run the network on one batch and predict what the whole run takes.

    Args:
        model: the network.
        batches: the calibration data.
        layers: the layers to prune.
        solver: the solver, which is asked for its time and memory.
        load: what the run does.
    """
    probe = probed(model, batches, layers)
    # Measuring the influence keeps activations that a forward pass drops.
    activations = (3 if load.shared else 1) * probe.bytes
    fixed = memory.resident() + network_bytes(model) + activations
    fixed = max(process_group().all_gather(fixed))  # the same decision on all processes
    needs = _layer_bytes(layers, solver, load)
    widest = max(needs, key=lambda name: needs[name])
    limit = memory.limit()
    room = _room(
        limit, fixed, needs[widest], widest,
        lambda: max(_layer_bytes(layers, solver, load).values()),
    )  # fmt: skip
    moments = load.shared or not load.sequential
    groups = passes(layers, room) if moments else []
    together = max((sum(moment_bytes(layer) for layer in group) for group in groups), default=0)
    return Forecast(
        limit=limit,
        room=room,
        fixed=fixed,
        peak=fixed + max(needs[widest], together, _refit_bytes(model, load)),
        spilled=sum(map(moment_bytes, layers)) if limit is not None and moments else 0,
        widest=widest,
        widest_bytes=needs[widest],
        groups=tuple(tuple(layer.name for layer in group) for group in groups),
        stages=tuple(_stages(model, layers, solver, load, probe, len(groups))),
    )


def _refit_bytes(model: nn.Module, load: Workload) -> int:
    """Return the bytes that refitting the largest block takes, where blocks were asked for."""
    blocks = candidates(model) if load.refit == "blocks" else []
    sizes = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks]
    return WORK_BYTES * max(sizes, default=0)


def _layer_bytes(layers: Sequence[Layer], solver: Solver, load: Workload) -> dict[str, int]:
    """Return what each layer takes, with the masks of those solved before it."""
    needs, masks = {}, 0
    for layer in layers:
        needs[layer.name] = masks + solving_bytes(
            layer, solver, sequential=load.sequential, damped=load.damped
        )
        masks += layer.weight.numel()
    return needs


def _enough(fixed: int, widest_bytes: int, needs: Callable[[], int]) -> float:
    """Return a limit that is enough. A larger limit lets layers take more, so it is searched."""
    enough = _MARGIN * (fixed + widest_bytes)
    for _ in range(20):
        with memory.limited(round(enough)):
            asked = _MARGIN * (fixed + needs())
        if asked <= enough:
            break
        enough = asked
    return enough


def _room(
    limit: int | None, fixed: int, widest_bytes: int, widest: str, needs: Callable[[], int]
) -> float | None:
    """Return the bytes left for moments; raise where the widest layer does not fit."""
    if limit is None:
        return None
    room = limit - fixed
    if widest_bytes > _SLACK * room:
        enough = memory.enough(_enough(fixed, widest_bytes, needs))
        raise LobsError(
            f"memory={spelled(limit)} is not enough: {spelled(fixed)} for what is there and "
            f"the network's copy, {spelled(widest_bytes)} for layer '{widest}'. "
            f"Allow {enough}, or skip the layer."
        )
    return max(0.0, room - _ROWS)


def taken_in_the_end(model: nn.Module, layers: Sequence[Layer]) -> int:
    """Return the bytes of a network, its pruned copy and the masks."""
    return 2 * network_bytes(model) + sum(layer.weight.numel() for layer in layers)


def network_bytes(model: nn.Module) -> int:
    """Return the bytes of all of a network's tensors, shared ones counted once."""
    tensors = [
        t
        for t in model.state_dict(keep_vars=True).values()
        if isinstance(t, Tensor) and not is_lazy(t)
    ]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def solving_bytes(layer: Layer, solver: Solver, *, sequential: bool, damped: bool = False) -> int:
    """Return the bytes that calibrating and solving one layer takes beside the networks.

    Args:
        layer: the layer.
        solver: the solver, which is asked for its memory.
        sequential: moments of two streams of activations are collected.
        damped: the caller chose the damping.
    """
    shape = _shape(layer, damped=damped)
    second = 0 if shape.single_copy or not sequential else 8 * shape.groups * shape.columns**2
    return bytes_of(solver, shape) + second + _ROWS


def _shape(layer: Layer, target: Target | None = None, *, damped: bool = False) -> ProblemShape:
    return ProblemShape(
        groups=layer.groups,
        rows=layer.rows,
        columns=layer.columns + 1,
        protected=1,
        target=target,
        single_copy=memory.single_copy(layer.groups, layer.columns) and not damped,
        context=context.current(),
    )


def _stages(
    model: nn.Module,
    layers: Sequence[Layer],
    solver: Solver,
    load: Workload,
    probe: Probe,
    groups: int,
) -> Iterator[Stage]:
    forward = probe.forward
    yield Stage("count inputs", 1, forward)
    if groups:
        yield Stage("moments", groups, groups * forward + probe.products)
    by_blocks = load.refit == "blocks" or not affordable(probe.madds, probe.samples, WORK)
    looks = (load.looks or load.rounds) if load.shared else 0
    if looks:
        some = min(1.0, INFLUENCE_SAMPLES / max(1, probe.samples)) if by_blocks else 1.0
        yield Stage("influence", looks, 3 * looks * some * forward)
    last = before_refit(solver) if by_blocks and load.refit != "layers" else solver
    solving = sum(
        seconds_of(last, _shape(layer, asked))
        for layer in layers
        if (asked := for_layer(load.target, layer.name)) is not None
    )
    # All but the last round of a large network are solved on moments that are there already.
    walks = 1 if by_blocks and load.refit != "layers" and load.looks is None else load.runs
    walk = 2 * forward + probe.paired if load.sequential else 0.0
    yield Stage("prune", 2 * walks if walk else 0, walks * walk + load.runs * solving)
    refitted = load.refit != "layers" and (probe.batches > 1 or probe.samples >= SMALL)
    blocks = refitted and by_blocks and bool(candidates(model))
    if blocks:
        yield from _refitting_blocks(load, forward)
    elif refitted:
        yield from _refitting(probe, layers, load, sum(1 for _ in model.modules()))
    if load.batch_norm and find_norms(model) and not blocks:  # whose refit moves the norms
        # Both networks, the pruned one with new statistics, then both with these.
        yield Stage("batch norm", 5 * walks, 5 * walks * forward)
    else:
        yield Stage("measure", 2, 2 * forward)


def _refitting_blocks(load: Workload, forward: float) -> Iterator[Stage]:
    """Predict the refit of blocks, and of the whole network after them.

    A step is a forward and a backward pass. That of the whole network runs the dense one, too.
    """
    runs = 1 if load.looks is None else load.runs
    passes = runs * BLOCKS.epochs
    yield Stage("refit blocks", passes, 3 * passes * forward)
    if load.refit == "network":
        passes = runs * WHOLE.epochs
        yield Stage("refit network", passes, 4 * passes * forward)


def _refitting(
    probe: Probe, layers: Sequence[Layer], load: Workload, modules: int
) -> Iterator[Stage]:
    """Predict the joint refit. The number of weights left comes from the target if it says it.

    Args:
        probe: what one batch has shown.
        layers: the layers.
        load: what the run does.
        modules: the network's number of modules.
    """
    left = 0.0
    for layer in layers:
        match for_layer(load.target, layer.name):
            case Sparsity(fraction=float() as gone):
                left += (1 - gone) * layer.weight.numel()
            case None:
                pass
            case _:
                left += _KEPT * layer.weight.numel()
    plan = effort(round(left), probe.outputs, probe.madds, probe.samples, load.refit_work)
    if not plan.steps:
        return
    # Every trial of a drop search ends with a refit. A step's batches stay in memory, so the data
    # is read far less often than networks run.
    runs = 1 if load.looks is None else load.runs
    read = runs * plan.steps * plan.samples
    calls = PASSES * read * probe.batches / max(1, probe.samples)
    each = max(_CALL, _MODULE * modules)
    seconds = PASSES * read * probe.madds * COSTS.product / 1e9 + calls * each
    yield Stage("refit", -(-read // max(1, probe.samples)), seconds)
