"""Move the kept weights of a module by Adam, judged on held-out samples.

The steps are Adam's (Kingma and Ba 2015) on a copy in float32. A weight's step is relative to the
typical size of its tensor's survivors, in units that the caller may give. After every epoch the
held-out distance is measured. An epoch that leads away from the dense output is undone, and the
next one takes shorter steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.layers import Layer
from lobs.layers.discovery import as_layer
from lobs.pruning.refit.joint import kept_entries


@dataclass(frozen=True)
class Schedule:
    """How long a descent goes on.

    Args:
        epochs: number of epochs; the held-out distance is measured after each.
        steps: steps of an epoch, about.
        rate: first step, relative to the root mean square of a tensor's survivors and to the
            square root of the first distance. A half cosine leads from there to zero.
        betas: decay rates of Adam's averages.
        shorter: factor on the steps after an epoch that led away. That epoch is undone.
    """

    epochs: int
    steps: int
    rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    shorter: float = 0.25


@dataclass(frozen=True)
class Piece:
    """Some rows of one sample."""

    sample: int
    rows: range


class Objective(Protocol):
    """A distance from the dense output."""

    fit: Sequence[Piece]
    held: Sequence[Piece]
    rows: int  # of this process in one step
    steps: int | None  # of an epoch; None: until all pieces have been seen

    def loss(self, work: nn.Module, piece: Piece) -> Tensor:
        """Return the distance, summed over a piece, in units of any size that all pieces share."""

    def distance(self, work: nn.Module) -> float:
        """Return the distance on the held-out pieces of all processes."""


Free = list[tuple[str, nn.Parameter, Tensor | None]]


@dataclass(frozen=True)
class Descent:
    """The effect: distances on held-out samples, and the epochs until the weights that stay.

    `reason` says why nothing was tried.
    """

    before: float = 0.0
    after: float = 0.0
    epochs: int = 0
    held_out: int = 0
    reason: str = ""


def free_parameters(
    work: nn.Module,
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
    prefix: str = "",
    shared: Collection[str] = (),
) -> Free:
    """Return the parameters that may move, each with its mask; all others are frozen.

    Those are the kept weights and the biases of these layers, and vectors that belong to no layer,
    such as norm gains.

    Args:
        work: the module.
        layers: its pruned layers.
        masks: True where a weight is kept, by parameter name.
        prefix: what the names of the module's parameters begin with in the network.
        shared: names of parameters that are used elsewhere too, which stay.
    """
    chosen = {
        name.removeprefix(prefix): mask.to(torch.bool)
        for name, mask in kept_entries(layers, masks).items()
    }
    found: Free = []
    for name, parameter in work.named_parameters():
        owner = work.get_submodule(name.rpartition(".")[0])
        alone = parameter.dim() == 1 and as_layer("", owner) is None
        moves = (name in chosen or alone) and name not in shared
        parameter.requires_grad_(moves)
        if moves:
            mask = chosen.get(name)
            found.append((name, parameter, None if mask is None else mask.to(parameter.device)))
    return found


def _fault_of(work: nn.Module, objective: Objective) -> str:
    """Return why a module cannot be refitted; empty where a first step is possible.

    All processes get the same answer.
    """
    fault = ""
    try:
        with torch.enable_grad():
            for piece in objective.fit[:1]:
                objective.loss(work, piece).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # the user's code may fail in any way
        fault = f"it cannot be differentiated: {' '.join(str(error).split())[:150]}"
    work.zero_grad(set_to_none=True)
    return next((word for word in process_group().all_gather(fault) if word), "")


@torch.no_grad()
def separable(far: Callable[[Piece], Tensor], whole: Piece) -> bool:
    """Return whether a module gives for a part of a batch what it gives for it in the whole.

    Args:
        far: the distance of a piece from the dense output.
        whole: all rows of a sample.
    """
    if len(whole.rows) < 2:
        return True
    parts = [Piece(whole.sample, whole.rows[:1]), Piece(whole.sample, whole.rows[1:])]
    try:
        return math.isclose(
            sum(float(far(part)) for part in parts), float(far(whole)), rel_tol=1e-3
        )
    except Exception:  # the user's code may refuse a part in any way
        return False


def descend(
    module: nn.Module,
    work: nn.Module,
    free: Free,
    objective: Objective,
    schedule: Schedule,
    label: str,
    units: Mapping[str, Tensor] | None = None,
) -> Descent:
    """Move the free parameters, and write those that are best on held-out samples into a module.

    Weights are judged as they will be stored, rounded to their own type.

    Args:
        module: where the weights go, if any come nearer.
        work: its copy in float32, which is changed.
        free: the copy's free parameters.
        objective: the distance.
        schedule: how long.
        label: what the progress display says.
        units: for some parameters, the factor on each weight's step.
    """
    fault = _fault_of(work, objective)
    if fault:
        return Descent(reason=fault)
    group, own = process_group(), dict(module.named_parameters())
    before = best = objective.distance(work)
    rows = round(group.sum_numbers(float(sum(len(p.rows) for p in objective.held)))[0])
    if not 0 < before < math.inf:
        return Descent(before, before, 0, rows)
    best_at = {name: parameter.detach().clone() for name, parameter, _ in free}
    adam, epochs = _Adam(work, free, objective, schedule, math.sqrt(before), units or {}), 0
    with track(label, schedule.epochs * schedule.steps) as advance:
        for epoch in range(schedule.epochs):
            adam.epoch(epoch)
            exact = {name: parameter.detach().clone() for name, parameter, _ in free}
            for name, parameter, _ in free:
                parameter.data.copy_(exact[name].to(own[name].dtype))
            now = objective.distance(work)
            advance(schedule.steps)
            if now < best:
                best, epochs = now, epoch + 1
                best_at = {name: parameter.detach().clone() for name, parameter, _ in free}
            else:
                exact = best_at
                adam.restart()
            for name, parameter, _ in free:
                parameter.data.copy_(exact[name])
    if epochs:
        group.broadcast(*best_at.values())  # so that all processes have the same bits
        for name, value in best_at.items():
            own[name].data.copy_(value)
    return Descent(before, best, epochs, rows)


class _Adam:
    """Adam on the free parameters, epoch by epoch.

    Args:
        work: the module.
        free: its free parameters.
        objective: the distance.
        schedule: how long.
        size: what the first step is relative to, beside the parameters.
        units: for some parameters, the factor on each weight's step.
    """

    def __init__(
        self,
        work: nn.Module,
        free: Free,
        objective: Objective,
        schedule: Schedule,
        size: float,
        units: Mapping[str, Tensor],
    ) -> None:
        self.work, self.free, self.objective, self.schedule = work, free, objective, schedule
        self.units = [units.get(name) for name, _, _ in free]
        self.rates = [
            schedule.rate * size * _typical(p, mask, unit)
            for (_, p, mask), unit in zip(free, self.units, strict=True)
        ]
        self.generator = torch.Generator().manual_seed(0)
        self._begin()

    def _begin(self) -> None:
        self.optimizer = torch.optim.Adam(
            [{"params": [p], "lr": r} for (_, p, _), r in zip(self.free, self.rates, strict=True)],
            betas=self.schedule.betas,
        )

    def restart(self) -> None:
        """Begin again with smaller steps: the last ones led away."""
        self.rates = [rate * self.schedule.shorter for rate in self.rates]
        self._begin()

    def epoch(self, number: int) -> None:
        """Take the steps of one epoch."""
        group, fit, objective = process_group(), self.objective.fit, self.objective
        order = [fit[i] for i in torch.randperm(len(fit), generator=self.generator)]
        steps = _joined(order, objective.rows)[: objective.steps]
        many = max(group.all_gather(len(steps)))
        for index in range(many):
            self._set_rate((number + index / many) / self.schedule.epochs)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                for piece in steps[index] if index < len(steps) else ():
                    objective.loss(self.work, piece).backward()  # type: ignore[no-untyped-call]
            for _, parameter, mask in self.free:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if mask is not None:
                    parameter.grad.mul_(mask)
            group.all_reduce(*(p.grad for _, p, _ in self.free if p.grad is not None))
            self._step()

    def _step(self) -> None:
        """Take Adam's step, and scale it: Adam's own does not depend on the gradient's size."""
        scaled = [
            (p, u) for (_, p, _), u in zip(self.free, self.units, strict=True) if u is not None
        ]
        before = [p.detach().clone() for p, _ in scaled]
        self.optimizer.step()
        for (parameter, unit), old in zip(scaled, before, strict=True):
            parameter.data.sub_(old).mul_(unit).add_(old)

    def _set_rate(self, progress: float) -> None:
        """Set the steps' size: a half cosine from the first to nothing."""
        factor = 0.5 * (1 + math.cos(math.pi * progress))
        for parameters, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            parameters["lr"] = rate * factor


def cut(pieces: Sequence[Piece], rows: int) -> list[Piece]:
    """Cut pieces into smaller ones of at most `rows` rows."""
    return [
        Piece(whole.sample, range(row, min(whole.rows.stop, row + rows)))
        for whole in pieces
        for row in range(whole.rows.start, whole.rows.stop, rows)
    ]


def _typical(parameter: Tensor, mask: Tensor | None, unit: Tensor | None) -> float:
    kept = parameter.numel() if mask is None else int(mask.sum())
    own = parameter.detach().double()
    own = own if unit is None else own / unit
    return math.sqrt(float(own.square().sum()) / max(1, kept))


def _joined(pieces: Sequence[Piece], rows: int) -> list[list[Piece]]:
    """Join pieces to steps of about `rows` rows."""
    steps: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(len(p.rows) for p in steps[-1]) >= rows:
            steps.append([])
        steps[-1].append(piece)
    return [step for step in steps if step]
