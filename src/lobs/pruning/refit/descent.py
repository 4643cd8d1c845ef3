"""Move the kept weights of a module by Adam, judged on held-out samples.

The steps are Adam's (Kingma and Ba 2015) with Nesterov's momentum, on a copy in float32. A weight's
step is one over the root of its curvature. Curvatures differ by many orders of magnitude: a
language model has inputs a hundred times larger than others, and units that all later layers depend
on. They are estimated once, from products with random signs. After every epoch the held-out
distance is measured. An epoch that leads away from the dense output is undone, and the next one
takes shorter steps.
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
from lobs.pruning.refit.exchange import Exchange
from lobs.pruning.refit.joint import kept_entries

_PROBED = 8  # pieces that curvatures are estimated on
_FLOOR = 0.02  # least curvature, relative to its tensor's mean
_LEAST_GRADIENT = 1e-12  # below which Adam takes shorter steps


@dataclass(frozen=True)
class Schedule:
    """How long a descent goes on.

    Args:
        epochs: number of epochs, at most; the held-out distance is measured after each.
        steps: steps of an epoch, about.
        rate: size of the first step: its squared effect on the output, if the effects of weights
            were independent, is `rate`² times the distance. A half cosine leads from there to zero.
        betas: decay rates of Adam's averages.
        shorter: factor on the steps after an epoch that led away. That epoch is undone.
        worth: least share of the distance that an epoch must win.
        patience: epochs that may win less before the descent ends.
    """

    epochs: int
    steps: int
    rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    shorter: float = 0.25
    worth: float = 0.005
    patience: int = 2


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

    def probe(self, work: nn.Module, piece: Piece, generator: torch.Generator) -> Tensor:
        """Return a number whose squared gradients are half the loss's curvatures, on average.

        Args:
            work: the module.
            piece: some rows.
            generator: where the random signs come from.
        """

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
    exchange: Exchange | None = None,
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
        exchange: weights that may change places after the first epoch; its masks are those that
            stay.
    """
    fault = _fault_of(work, objective)
    if fault:
        return Descent(reason=fault)
    group, own = process_group(), dict(module.named_parameters())
    before = best = objective.distance(work)
    rows = round(group.sum_numbers(float(sum(len(p.rows) for p in objective.held)))[0])
    if not 0 < before < math.inf:
        return Descent(before, before, 0, rows)
    adam, epochs, idle = _Adam(work, free, objective, schedule, exchange), 0, 0
    best_at = adam.state()
    with track(label, schedule.epochs * schedule.steps) as advance:
        for epoch in range(schedule.epochs):
            adam.epoch(epoch)
            exact = adam.state()
            for name, parameter, _ in free:
                parameter.data.copy_(parameter.to(own[name].dtype))
            now = objective.distance(work)
            advance(schedule.steps)
            idle = 0 if now < (1 - schedule.worth) * best else idle + 1
            if now < best:
                best, epochs, best_at = now, epoch + 1, exact
                adam.write(best_at)
            else:
                adam.restart(best_at)
            if idle == schedule.patience:
                break
            if epoch == 0 and schedule.epochs > 1:
                adam.exchange_weights()
    adam.write(best_at)
    if epochs:
        for name, parameter, _ in free:
            own[name].data.copy_(parameter)
    return Descent(before, best, epochs, rows)


class _Vector:
    """The free weights as one vector: the kept ones of each tensor, one tensor after another.

    At 90 % zeros its steps cost a tenth of what those of whole tensors cost.
    """

    def __init__(self, free: Free) -> None:
        self.free = free
        self.places = [
            None if mask is None else mask.flatten().nonzero().squeeze(1) for _, _, mask in free
        ]
        self.counts = [
            p.numel() if at is None else len(at)
            for (_, p, _), at in zip(free, self.places, strict=True)
        ]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the free entries of tensors in the parameters' shapes."""
        flat = [tensor.detach().flatten() for tensor in tensors]
        parts = [x if at is None else x[at] for x, at in zip(flat, self.places, strict=True)]
        return torch.cat([part.to(parts[0].device) for part in parts])

    def read(self) -> Tensor:
        """Return the weights."""
        return self.gather([parameter for _, parameter, _ in self.free])

    def gradients(self) -> Tensor:
        """Return the gradients; zero where a weight took no part."""
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p, _ in self.free]
        return self.gather(found)

    @torch.no_grad()
    def write(self, values: Tensor, into: Sequence[Tensor] | None = None) -> None:
        """Write the weights, or values of each weight into tensors of the parameters' shapes."""
        targets = [p for _, p, _ in self.free] if into is None else into
        parts = torch.split(values, self.counts)
        for target, at, part in zip(targets, self.places, parts, strict=True):
            if at is None:
                target.copy_(part.view_as(target))
            else:
                target.put_(at, part.to(target.device))


@dataclass(frozen=True)
class _State:
    """The weights, which of them are free, and the masks of those that may change places."""

    vector: _Vector
    values: Tensor
    masks: dict[str, Tensor]


class _Adam:
    """Adam with Nesterov's momentum (Dozat 2016) on the free parameters, epoch by epoch.

    Args:
        work: the module.
        free: its free parameters.
        objective: the distance.
        schedule: how long.
        exchange: weights that may change places after the first epoch.
    """

    def __init__(
        self,
        work: nn.Module,
        free: Free,
        objective: Objective,
        schedule: Schedule,
        exchange: Exchange | None = None,
    ) -> None:
        self.work, self.objective, self.schedule = work, objective, schedule
        self.exchange = exchange
        self.generator = torch.Generator().manual_seed(0)
        self.vector = _Vector(free)
        self.whole_sizes, self.each = _step_sizes(work, free, objective)
        self.sizes = self.vector.gather(self.whole_sizes)
        self.rate = schedule.rate
        self._begin()

    def _begin(self) -> None:
        self.mean, self.square = torch.zeros_like(self.sizes), torch.zeros_like(self.sizes)
        self.taken = 0

    def state(self) -> _State:
        """Return the weights as they are now."""
        masks = {} if self.exchange is None else dict(self.exchange.masks)
        return _State(self.vector, self.vector.read(), masks)

    def write(self, state: _State) -> None:
        """Write weights, the same in all processes; those that are not free any more become 0."""
        process_group().broadcast(state.values)
        if state.vector is not self.vector:
            self._support(state.vector)
            if self.exchange is not None:
                self.exchange.masks.update(state.masks)
        self.vector.write(state.values)

    def restart(self, state: _State) -> None:
        """Begin again with smaller steps and no more exchanges: the last ones led away."""
        self.write(state)
        self.exchange = None
        self.rate *= self.schedule.shorter
        self._begin()

    def epoch(self, number: int) -> None:
        """Take the steps of one epoch."""
        group, fit, objective = process_group(), self.objective.fit, self.objective
        order = [fit[i] for i in torch.randperm(len(fit), generator=self.generator)]
        steps = _joined(order, objective.rows)[: objective.steps]
        many, values = max(group.all_gather(len(steps))), self.vector.read()
        watched = set() if self.exchange is None or number else self.exchange.names()
        self.slopes = {n: torch.zeros_like(p) for n, p, _ in self.vector.free if n in watched}
        self.seen = group.sum_numbers(float(sum(len(p.rows) for step in steps for p in step)))[0]
        for index in range(many):
            progress = (number + index / many) / self.schedule.epochs
            self.work.zero_grad(set_to_none=True)
            with torch.enable_grad():
                for piece in steps[index] if index < len(steps) else ():
                    objective.loss(self.work, piece).backward()  # type: ignore[no-untyped-call]
            for name, parameter, _ in self.vector.free:
                if name in self.slopes and parameter.grad is not None:
                    self.slopes[name].add_(parameter.grad)
            # In units of the steps, so that squares fit into float32.
            gradient = self.vector.gradients().mul_(self.sizes)
            group.all_reduce(gradient)
            step = self._step(gradient).mul_(self.sizes)
            values.sub_(step, alpha=self.rate * 0.5 * (1 + math.cos(math.pi * progress)))
            self.vector.write(values)
        self.work.zero_grad(set_to_none=True)

    def _step(self, gradient: Tensor) -> Tensor:
        """Return a step of length 1, about; it does not depend on the gradient's size."""
        slow, fast = self.schedule.betas
        self.taken += 1
        self.mean.lerp_(gradient, 1 - slow)
        self.square.mul_(fast).addcmul_(gradient, gradient, value=1 - fast)
        ahead = self.mean * (slow / (1 - slow ** (self.taken + 1)))
        ahead.add_(gradient, alpha=(1 - slow) / (1 - slow**self.taken))
        root = (self.square / (1 - fast**self.taken)).sqrt_().add_(_LEAST_GRADIENT)
        return ahead.div_(root)

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """Let weights change places, by the gradients of the last epoch."""
        if self.exchange is None or not self.slopes:
            return
        gains, costs = {}, {}
        process_group().all_reduce(*self.slopes.values())
        for (name, parameter, _), size in zip(self.vector.free, self.whole_sizes, strict=True):
            if name in self.slopes:
                # Half a curvature is each / size². Slopes are per row, as `each` is.
                slope, unit = self.slopes[name].double() / self.seen, size.double()
                gains[name] = (slope * unit).square() / (4 * self.each)
                costs[name] = (parameter.double() / unit).square() * self.each
        self.exchange.take(gains, costs)
        mask_of = self.exchange.free_mask
        self._support(_Vector([(n, p, mask_of(n, mask)) for n, p, mask in self.vector.free]))

    @torch.no_grad()
    def _support(self, vector: _Vector) -> None:
        """Set other weights free. Those that are not free any more become 0."""
        sums = []
        for old in (self.mean, self.square):
            whole = [torch.zeros_like(p) for _, p, _ in vector.free]
            self.vector.write(old, whole)
            sums.append(vector.gather(whole))
        for (_, parameter, now), (_, _, mask) in zip(vector.free, self.vector.free, strict=True):
            if now is not None and mask is not None:
                parameter.masked_fill_(mask & ~now, 0)
        self.mean, self.square = sums
        self.vector, self.sizes = vector, vector.gather(self.whole_sizes)


def _step_sizes(work: nn.Module, free: Free, objective: Objective) -> tuple[list[Tensor], float]:
    """Return √(L / N h) for every weight: L is the loss now, N their number, h half a curvature.

    If weights acted independently, moving all of them that far would add L to the loss. L / N of
    one row comes too.
    """
    generator = torch.Generator().manual_seed(process_group().rank)
    squares = [torch.zeros_like(p, dtype=torch.float64) for _, p, _ in free]
    loss, rows = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    every = max(1, len(objective.fit) // _PROBED)
    with torch.enable_grad():
        for piece in objective.fit[::every][:_PROBED]:
            work.zero_grad(set_to_none=True)
            objective.probe(work, piece, generator).backward()  # type: ignore[no-untyped-call]
            for (_, parameter, _), total in zip(free, squares, strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad.double().square())
            with torch.no_grad():
                loss += objective.loss(work, piece).detach().cpu()
                rows += len(piece.rows)
    work.zero_grad(set_to_none=True)
    process_group().all_reduce(*squares, loss, rows)
    count = sum(p.numel() if mask is None else int(mask.sum()) for _, p, mask in free)
    each = float(loss) / max(1, count)
    sizes = [
        (each / _smoothed(h)).sqrt().to(p.dtype) for h, (_, p, _) in zip(squares, free, strict=True)
    ]
    return sizes, each / max(1.0, float(rows))


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random signs in a tensor's shape, drawn on the CPU so that all devices agree."""
    signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return signs.to(like).mul_(2).sub_(1)


def _smoothed(squares: Tensor) -> Tensor:
    """Replace noisy squares by row mean × column mean, bounded from below; infinite if all zero."""
    if squares.dim() > 1:
        lines = squares.flatten(1)
        rows, columns = lines.mean(dim=1, keepdim=True), lines.mean(dim=0, keepdim=True)
        squares = (rows * (columns / columns.mean())).view_as(squares)
    mean = squares.mean()
    return squares + _FLOOR * mean if mean > 0 else torch.full_like(squares, math.inf)


def cut(pieces: Sequence[Piece], rows: int) -> list[Piece]:
    """Cut pieces into smaller ones of at most `rows` rows."""
    return [
        Piece(whole.sample, range(row, min(whole.rows.stop, row + rows)))
        for whole in pieces
        for row in range(whole.rows.start, whole.rows.stop, rows)
    ]


def _joined(pieces: Sequence[Piece], rows: int) -> list[list[Piece]]:
    """Join pieces to steps of about `rows` rows."""
    steps: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(len(p.rows) for p in steps[-1]) >= rows:
            steps.append([])
        steps[-1].append(piece)
    return [step for step in steps if step]
