"""What a run will take before it is run: passes over the data, bytes, about how many seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from threading import Event, Thread
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.memory import spelled
from lobs.calibration.batch_norm import find_norms
from lobs.calibration.collect import collect_moments
from lobs.calibration.forward import length
from lobs.calibration.moments import weighed
from lobs.calibration.on_demand import moment_bytes, passes
from lobs.errors import LobsError
from lobs.layers import Layer, watching
from lobs.pruning.refit.gauss_newton import PASSES
from lobs.pruning.refit.joint import Refit, effort
from lobs.pruning.refit.split import SMALL
from lobs.solvers import ADMM, LOBS, Auto, ColumnSweep
from lobs.solvers.auto import PRODUCT, seconds_of
from lobs.solvers.problem import Solver
from lobs.targets import Sparsity, Target, for_layer

_ROWS = 2**28  # bytes for the rows that are worked on together
_SLACK = 1.02  # forecasts are not better than that
_CALL = 2e-4  # seconds that a small network takes whatever it computes


@dataclass(frozen=True)
class Stage:
    """A part of the run: how often it goes through the data, and how long that and what follows may take."""

    name: str
    passes: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What a run will take; `room` is for the moments of one pass, None without a limit."""

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
        """How often a network goes through the data."""
        return sum(stage.passes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """About how long all of it takes on two cores."""
        return sum(stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        lines = [
            f"{stage.name}: a network's passes over the data {stage.passes}, seconds about "
            f"{stage.seconds:,.1f}"
            for stage in self.stages
        ]
        held = f"; {spelled(self.spilled)} of moments go to temporary files" if self.spilled else ""
        promised = "" if self.limit is None else f" of {spelled(self.limit)}"
        lines.append(f"in all: {self.passes}, about {self.seconds:,.1f} seconds")
        lines.append(
            f"memory: about {spelled(self.peak)}{promised}: {spelled(self.fixed)} for what is "
            "there and the network's copy, "
            f"{spelled(self.widest_bytes)} for layer '{self.widest}'{held}"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "passes": self.passes, "seconds": self.seconds}


def forecast(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    solver: Solver,
    *,
    inputs: str,
    shared: bool,
    rounds: int,
    target: Target,
    looks: int | None = None,
    damped: bool = False,
    batch_norm: bool = True,
    compensation: tuple[Refit, float | None] = ("layers", None),
) -> Forecast:
    """Look at the network and at one batch; `shared` says that one budget is shared out by error curves, `rounds` times.

    The units' influence is looked at as often, or `looks` times. `target` matters where it is a
    pattern, which costs what its kind does. `compensation` says whether all weights move together
    in the end, and in how many multiply-adds.
    """
    sequential, moments = inputs != "dense", shared or inputs == "dense"
    seen = _looked_at(model, batches, layers)
    forward, products, paired, work = seen.forward, seen.products, seen.paired, seen.bytes
    # Going back, the influence keeps what going forward drops.
    on_the_way = (3 if shared else 1) * work
    fixed = memory.resident() + network_bytes(model) + on_the_way
    fixed = max(process_group().all_gather(fixed))  # processes must agree on what they do
    needs, masks = {}, 0
    for layer in layers:  # the masks of those before it are there when a layer is solved
        needs[layer.name] = masks + solving_bytes(
            layer, solver, sequential=sequential, damped=damped
        )
        masks += layer.weight.numel()
    widest = max(needs, key=lambda name: needs[name])
    limit = memory.limit()
    room = None if limit is None else limit - fixed
    if room is not None and needs[widest] > _SLACK * room:
        enough = spelled(1.01 * (fixed + needs[widest]))
        raise LobsError(
            f"memory={spelled(limit or 0)} is not enough: {spelled(fixed)} for what is there and "
            "the network's copy, "
            f"{spelled(needs[widest])} for layer '{widest}'. Allow {enough}, or skip the layer."
        )
    room = None if room is None else max(0.0, room - _ROWS)  # products and pieces of a pass
    groups = passes(layers, room) if moments else []
    together = max((sum(moment_bytes(layer) for layer in group) for group in groups), default=0)
    spilled = sum(map(moment_bytes, layers)) if limit is not None and moments else 0
    solving = sum(
        seconds_of(solver, layer.groups, layer.groups * layer.rows, layer.columns + 1, asked)
        for layer in layers
        if (asked := for_layer(target, layer.name)) is not None
    )
    rounds = rounds if shared else 1
    compensated = 1 if looks is None else rounds  # every trial of a largest drop ends with it
    looks = (looks or rounds) if shared else 0
    walk = 2 * forward + paired if sequential else 0.0
    norms = batch_norm and bool(find_norms(model))
    stages = tuple(
        _stages(
            forward, products, walk, solving, len(groups), looks=looks, rounds=rounds, norms=norms
        )
    )
    if compensation[0] == "network" and (seen.batches > 1 or seen.samples >= SMALL):
        stages = (
            *stages[:-1],
            *_compensating(seen, layers, target, compensation[1], compensated),
            stages[-1],
        )
    names = tuple(tuple(layer.name for layer in group) for group in groups)
    return Forecast(
        limit,
        room,
        fixed,
        fixed + max(needs[widest], together),
        spilled,
        widest,
        needs[widest],
        names,
        stages,
    )


def taken_in_the_end(model: nn.Module, layers: Sequence[Layer]) -> int:
    """Bytes of a network, its pruned copy and the masks."""
    return 2 * network_bytes(model) + sum(layer.weight.numel() for layer in layers)


def network_bytes(model: nn.Module) -> int:
    """Bytes of all of a network's tensors, each counted once under whatever names it goes."""
    tensors = [
        t
        for t in model.state_dict(keep_vars=True).values()
        if isinstance(t, Tensor) and not is_lazy(t)
    ]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def solving_bytes(layer: Layer, solver: Solver, *, sequential: bool, damped: bool = False) -> int:
    """What calibrating and solving one layer takes at most, beside the networks."""
    d, weights = layer.columns + 1, layer.weight.numel()
    if memory.single_copy(layer.groups, layer.columns) and not damped:
        if isinstance(solver, LOBS):  # Ψ, its inverse, and a dozen forms of the weights
            return _ROWS + 8 * d**2 + 56 * weights
        directions = ADMM.bytes(layer.rows, d)
        if isinstance(solver, ColumnSweep) or (
            isinstance(solver, Auto) and not memory.affords(directions)
        ):
            return _ROWS + 4 * d**2 + 9 * weights
        return _ROWS + max(directions, 4 * d**2 + 56 * weights)
    # Sums, Ψ, its equilibrated form and that form's inverse; a second sum for two streams. Then a
    # dozen forms of the weights.
    return 8 * (5 + sequential) * layer.groups * d**2 + 56 * weights + _ROWS


def _stages(
    forward: float,
    products: float,
    walk: float,
    solving: float,
    groups: int,
    *,
    looks: int,
    rounds: int,
    norms: bool,
) -> Iterable[Stage]:
    yield Stage("count inputs", 1, forward)
    if groups:
        yield Stage("moments", groups, groups * forward + products)
    if looks:
        yield Stage("influence", looks, 3 * looks * forward)
    yield Stage("prune", 2 * rounds if walk else 0, rounds * (walk + solving))
    if norms:  # both networks, the pruned one again with new statistics; then both with these
        yield Stage("batch norm", 5 * rounds, 5 * rounds * forward)
    else:
        yield Stage("measure", 2, 2 * forward)


def _compensating(
    seen: _Look, layers: Sequence[Layer], target: Target, work: float | None, runs: int
) -> Iterator[Stage]:
    """Moving all weights together; how many are left is taken from the target where it says so."""
    left = 0.0
    for layer in layers:
        match for_layer(target, layer.name):
            case Sparsity(fraction=float() as gone):
                left += (1 - gone) * layer.weight.numel()
            case None:
                pass
            case _:
                left += 0.1 * layer.weight.numel()
    plan = effort(round(left), seen.outputs, seen.madds, seen.samples, work)
    # what a step works on stays in memory, so that data are read far less often than networks run
    if plan.steps:
        read = runs * plan.steps * plan.samples
        calls = PASSES * read * seen.batches / max(1, seen.samples)
        yield Stage(
            "refit",
            -(-read // max(1, seen.samples)),
            PASSES * read * seen.madds * PRODUCT / 1e9 + calls * _CALL,
        )


@dataclass(frozen=True)
class _Look:
    """Seconds of all batches forward, and of the products of all moments in one network and in two; bytes on the way.

    Then the number of samples, and for one of them the numbers that come out and the multiply-adds
    on the way.
    """

    forward: float
    products: float
    paired: float
    bytes: int
    batches: int
    samples: int
    outputs: float
    madds: float


def _looked_at(model: nn.Module, batches: Iterable[Any], layers: Sequence[Layer]) -> _Look:
    """Run the network on the first batch and take the others for its like."""
    first = list(islice(batches, 1))  # a process without data looks on
    for _ in range(2):  # the first time also loads and compiles
        began = time.perf_counter()
        with _watched() as most:
            before = memory.resident()
            with watching(layer.on_input(partial(_first_patches, layer)) for layer in layers):
                seen = collect_moments(model, first, layers, counts_only=True)
        took = time.perf_counter() - began
    count = max(process_group().all_gather(length(batches) or sum(1 for _ in batches)))
    madds = paired = 0
    for layer in layers:
        vectors, d = seen.count(layer.name) * layer.groups, layer.columns + 1
        madds += vectors * d**2
        paired += vectors * d * (d + (2 * layer.rows if weighed(layer) else d))
    unit = count * PRODUCT / 1e9
    each = max(1, seen.samples)
    uses = sum(
        seen.count(layer.name) * layer.uses_per_patch * layer.weight.numel() for layer in layers
    )
    outputs = sum(map(sum, seen.outputs)) / each
    on_the_way = max(0, most[0] - before)
    return _Look(
        count * took,
        unit * madds,
        unit * paired,
        on_the_way,
        count,
        count * seen.samples,
        outputs,
        uses / each,
    )


def _first_patches(layer: Layer, x: Tensor) -> None:
    """Make the first patches of an input, for the memory that they take."""
    next(layer.patches(x.detach()), None)


@contextmanager
def _watched() -> Iterator[list[int]]:
    """The most memory that is resident while this block runs: the process's own record may be an older one."""
    most, done = [0], Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], memory.resident())

    watcher = Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
