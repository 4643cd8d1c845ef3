"""All surviving weights moved together, so that the network's output, not each layer's own, comes nearest to the dense one's.

Layers are solved one by one: those behind can mend what a layer leaves over, those before it cannot. Here all survivors θ move
at once, to the least mean ‖f_θ(x) − f_dense(x)‖²: the compensation of optimal brain surgery (Hassibi and Stork 1993) in
the whole network's metric instead of each layer's. Gauss–Newton steps: with J = ∂f/∂θ and the residual r, (JᵀJ + λD) δ = −Jᵀr
is approached by a few conjugate-gradient steps, D ≈ diag JᵀJ, in a metric that knows each row's own part of JᵀJ
(`preconditioning`). Neither J nor JᵀJ is ever formed: a product with JᵀJ is one derivative forward and one back. No labels;
what the dense network answers is all there is to know.

Every step sees other batches, and one batch in eight is never worked on: the weights that come nearest to the dense network
on those are the ones that stay. A step costs some forty passes over its batches, so large networks go without unless asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from lobs.calibrate import batch_size, call, collect, evaluating, length, main_output
from lobs.distributed import crew
from lobs.errors import CalibrationError, LobsError
from lobs.layers import Layer, watching
from lobs.layers.observing import Handle
from lobs.preconditioning import Preconditioner, Vector, affordable
from lobs.progress import track

Compensate: TypeAlias = Literal["layers", "network"]

# Multiply-adds that moving all weights together may take where nobody asked for it: some fifteen seconds on two cores.
WORK = 1.2e12
_MOST, _INSIDE = 12, 4  # Gauss–Newton steps, and conjugate-gradient steps in each
PASSES = 6 * _INSIDE + 12  # forward passes that a step costs as much as
# Equations to an unknown that a step works on, and the fewest samples: fewer are learned by heart.
_EQUATIONS, _FEWEST = 5.0, 200
_BLOCKS = 4  # passes that finding a layer's own part of JᵀJ may take as long as
_KEPT_BACK = 8  # one batch in so many
_TOGETHER = 2**21  # numbers in batches that are joined
_DAMPING, _FLOOR = 0.1, 0.02  # shares of D, and of its mean that is its least
_HALVINGS, _PATIENCE = 4, 2  # of a step that does not help; steps that bring nothing before the end


@dataclass(frozen=True)
class Compensation:
    """What moving all weights together did to the output's root mean square distance from the dense one's.

    Measured on `kept_back` samples that it did not work on. `reason` says why it was not done, where it was not.
    """

    steps: int = 0
    before: float | None = None
    after: float | None = None
    kept_back: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"layer by layer ({self.reason})"
        moved = f"output deviation {self.before:.4g} → {self.after:.4g} on {self.kept_back:,} samples kept back"
        if not self.steps:
            return f"layer by layer, since moving all weights together does not help ({moved})"
        return f"all layers together, {self.steps} steps ({moved})"


@dataclass(frozen=True)
class Effort:
    """How many steps, and how many samples each works on; `reason` if none."""

    steps: int
    samples: int
    reason: str = ""


def effort(free: int, outputs: float, madds: float, samples: int, work: float | None) -> Effort:
    """What is worth doing for so many free weights, outputs and multiply-adds a sample, within `work` multiply-adds in all."""
    wanted = max(_FEWEST, math.ceil(_EQUATIONS * free / max(1.0, outputs)))
    each = min(wanted, samples)
    cost = PASSES * madds * each
    steps = _MOST if work is None else min(_MOST, int(work / max(1.0, cost)))
    if steps:
        return Effort(steps, each)
    return Effort(0, each, f"moving all layers together would take some {_MOST * cost:.1g} multiply-adds")


def compensate(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
    *,
    samples: int,
    madds: float,
    work: float | None = WORK,
) -> Compensation:
    """Move the weights that `masks` keeps in `layers` of a pruned network, in place; zeros and everything else stay.

    `samples` is how many the batches hold in all, `madds` what one costs on its way through the network.
    """
    free = _free(layers, masks)
    kind = next((t.dtype for t in _parameters(model, free).values() if t.dtype not in (torch.float32, torch.float64)), None)
    if kind is not None:
        return Compensation(reason=f"weights are {str(kind).removeprefix('torch.')}")
    try:
        with evaluating(model), evaluating(dense), _differentiable():
            return _Survivors(model, dense, layers, free, batches).move(samples, madds, work)
    except _ImpossibleError as error:
        return Compensation(reason=str(error))


class _ImpossibleError(Exception):
    """Why this network's weights cannot be moved together."""


class _Survivors:
    """The weights that may move, as one vector, and how the network's output answers to them."""

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        layers: Sequence[Layer],
        free: Mapping[str, Tensor],
        batches: Iterable[Any],
    ) -> None:
        self.network, self.dense, self.layers, self.batches = _Network(model), dense, layers, batches
        self.parameters = _parameters(model, free)
        self.free = {name: mask.to(self.parameters[name]) for name, mask in free.items()}
        self.at: Vector = {name: t.detach().clone() for name, t in self.parameters.items()}

    def move(self, samples: int, madds: float, work: float | None) -> Compensation:
        """Step until nothing more is won on the batches kept back, and leave the network at its best."""
        count = length(self.batches)
        known = crew().hear(count)
        if None in known or sum(known) < 2 or min(known) < 2 - (crew().size > 1):
            return Compensation(reason="it takes two batches at least, one to be kept back, and a known number of them")
        outputs = self._outputs_a_sample()
        plan = effort(round(sum(float(f.sum()) for f in self.free.values())), outputs, madds, samples, work)
        if plan.reason:
            return Compensation(reason=plan.reason)
        every = min(_KEPT_BACK, max(count or 0, 2))
        share = -(-plan.samples // crew().size)
        kept_back = _Window(self, _some(self._stream(lambda i: i % every == every - 1, forever=False), share))
        at_work = self._stream(lambda i: i % every != every - 1, forever=True)
        first = before = best = kept_back.distance(self.at)
        chosen, steps, idle = self.at, 0, 0
        with track("compensate", plan.steps) as advance:
            for turn in range(plan.steps):
                self.write(self.at)
                self.at = _Window(self, _some(at_work, share)).step(self.at, turn)
                now = kept_back.distance(self.at)
                advance(1)
                if now < best:
                    best, chosen, steps = now, self.at, turn + 1
                idle = 0 if now < 0.998 * before else idle + 1
                before = min(before, now)
                if idle == _PATIENCE:
                    break
        self.write(chosen)
        return Compensation(steps, first, best, kept_back.samples)

    def write(self, at: Vector) -> None:
        """Put weights into the network."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(at[name])

    def answer(self, batch: Any) -> Callable[[Vector], Tensor]:
        """The network's output on a batch as a function of the weights."""
        return lambda at: self.network.answer(at, batch)

    def _outputs_a_sample(self) -> float:
        """How many numbers the network gives for one sample; also a first try whether it can be differentiated."""
        first = next(iter(self.batches), None)
        counted, seen, fault = 0, 0, ""
        if first is not None:
            zero = {name: torch.zeros_like(t) for name, t in self.at.items()}
            try:
                out = jvp(self.answer(first), (self.at,), (zero,))[0]
                vjp(self.answer(first), self.at)[1](torch.zeros_like(out))
                counted, seen = out.numel(), batch_size(first)
            except (LobsError, RuntimeError, NotImplementedError) as error:
                fault = " ".join(str(error).split())[:200]
        faults = [word for word in crew().hear(fault) if word]
        if faults:
            raise _ImpossibleError(f"the network cannot be differentiated forward and back: {faults[0]}")
        total, samples = crew().total(counted, seen)
        return total / max(1.0, samples)

    def _stream(self, wanted: Callable[[int], bool], *, forever: bool) -> Iterator[Any]:
        while True:
            found = False
            for index, batch in enumerate(self.batches):
                if wanted(index):
                    found = True
                    yield batch
            if not (forever and found):
                return


class _Window:
    """Some batches with the dense network's answers on them."""

    def __init__(self, survivors: _Survivors, batches: list[Any]) -> None:
        self.survivors, self.batches = survivors, _merged(batches)
        with torch.no_grad():
            self.wanted = [_tensor(call(survivors.dense, batch)) for batch in self.batches]
        self.samples = round(crew().total(sum(map(batch_size, batches)))[0])

    def distance(self, at: Vector) -> float:
        """Root mean square distance of the output from the dense one's."""
        total = 0.0
        with torch.no_grad():
            for batch, wanted in zip(self.batches, self.wanted, strict=True):
                total += float((self.survivors.answer(batch)(at) - wanted).to(torch.float64).square().sum())
        return math.sqrt(crew().total(total)[0] / max(1, self.samples))

    def step(self, at: Vector, turn: int) -> Vector:
        """One damped Gauss–Newton step, shortened until it helps on these batches; `at` itself if it never does."""
        slope, size = self._slope(at, turn)
        delta = self._solve(at, slope, size)
        here = self.distance(at)
        for halving in range(_HALVINGS + 1):
            there = {name: t + delta[name] * 0.5**halving for name, t in at.items()}
            if self.distance(there) < here:
                return there
        return at

    def _slope(self, at: Vector, turn: int) -> tuple[Vector, Vector]:
        """Half the gradient, Jᵀr, and D ≈ diag JᵀJ: squares of products with random signs, a row's mean times a column's."""
        generator = torch.Generator().manual_seed(1000 * turn + crew().rank)
        slope, squares = ({name: torch.zeros_like(t) for name, t in at.items()} for _ in range(2))
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            out, back = vjp(self.survivors.answer(batch), at)[:2]
            signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
            for name, t in back(out - wanted)[0].items():
                slope[name] += t / self.samples
            for name, t in back(signs)[0].items():
                squares[name] += t.square() / self.samples
        crew().add(*slope.values(), *squares.values())
        return self._masked(slope), {name: _smoothed(t) for name, t in squares.items()}

    def _metric(self, size: Vector) -> Preconditioner:
        """What is known of JᵀJ beforehand, from what reaches the layers of the network as it is now."""
        metric, free = Preconditioner(size), self.survivors.free
        once = {layer.name: self._uses(layer) for layer in self.survivors.layers}
        chosen = [layer for layer in self.survivors.layers if affordable(layer, free, _BLOCKS * once[layer.name])]
        with suppress(CalibrationError):  # these batches may not reach every layer
            metric.learn(chosen, collect(self.survivors.network.model, self.batches, chosen) if chosen else {}, free)
        return metric

    def _uses(self, layer: Layer) -> float:
        """Multiply-adds of a layer on these batches, taken for those of one use a sample."""
        return float(self.samples * layer.weight.numel())

    def _solve(self, at: Vector, slope: Vector, size: Vector) -> Vector:
        """Preconditioned conjugate gradients on (JᵀJ + λD) δ = −Jᵀr."""
        metric = self._metric(size)
        delta = {name: torch.zeros_like(t) for name, t in at.items()}
        residual = {name: -t for name, t in slope.items()}
        direction = metric(residual)
        energy = first = _dot(residual, direction)
        for _ in range(_INSIDE):
            if energy <= 1e-8 * first:
                break
            image = self._curved(at, direction, size)
            length_ = energy / _dot(direction, image)
            for name in delta:
                delta[name] += length_ * direction[name]
                residual[name] -= length_ * image[name]
            ahead = metric(residual)
            energy, before = _dot(residual, ahead), energy
            direction = {name: t + energy / before * direction[name] for name, t in ahead.items()}
        return delta

    def _curved(self, at: Vector, v: Vector, size: Vector) -> Vector:
        """(JᵀJ + λD) v."""
        image = {name: torch.zeros_like(t) for name, t in at.items()}
        for batch in self.batches:
            answer = self.survivors.answer(batch)
            moved = jvp(answer, (at,), (v,))[1]
            for name, t in vjp(answer, at)[1](moved)[0].items():
                image[name] += t / self.samples
        crew().add(*image.values())
        return self._masked({name: t + _DAMPING * size[name] * v[name] for name, t in image.items()})

    def _masked(self, vector: Vector) -> Vector:
        return {name: t * self.survivors.free[name] for name, t in vector.items()}


class _Network(nn.Module):
    """A network that takes one of the user's batches, as `call` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        return _tensor(call(self.model, batch))

    def answer(self, at: Vector, batch: Any) -> Tensor:
        """The output with these weights in place of the network's own."""
        out: Tensor = functional_call(self, {f"model.{name}": t for name, t in at.items()}, (batch,))
        return out


def _tensor(answer: Any) -> Tensor:
    out = main_output(answer)
    if out is None:
        raise _ImpossibleError("the network returns no floating-point tensor")
    return out


def _free(layers: Sequence[Layer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which numbers of which parameters may move: those of these layers that are kept."""
    free: dict[str, Tensor] = {}
    for layer in layers:
        for (name, (start, stop)), whole in zip(layer.parameters().items(), layer.tensors(), strict=True):
            mask = free.setdefault(name, torch.zeros(whole.shape, dtype=torch.bool, device=whole.device))
            mask[start:stop] = masks[name][start:stop].to(mask.device) if name in masks else True
    return free


def _parameters(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name: known[name] for name in names}


def _some(batches: Iterator[Any], samples: int) -> list[Any]:
    """The next batches with so many samples, or as many as there are."""
    found, seen = [], 0
    for batch in batches:
        found.append(batch)
        seen += batch_size(batch)
        if seen >= samples:
            break
    return found


def _merged(batches: list[Any]) -> list[Any]:
    """Batches of plain tensors joined to larger ones: what a call costs beside its products counts a hundred times here."""
    merged: list[Any] = []
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        last = merged[-1] if merged else None
        if not isinstance(x, Tensor) or x.dim() < 2:
            merged.append(batch)
        elif isinstance(last, Tensor) and last.shape[1:] == x.shape[1:] and last.numel() + x.numel() <= _TOGETHER:
            merged[-1] = torch.cat([last, x])
        else:
            merged.append(x)
    return merged


def _smoothed(squares: Tensor) -> Tensor:
    """One look at every number is noise, but rows and columns have means; none is taken for dead."""
    if squares.dim() > 1:
        lines = squares.flatten(1)
        total = lines.sum().clamp_min(torch.finfo(lines.dtype).tiny)
        squares = (lines.sum(dim=1, keepdim=True) * (lines.sum(dim=0, keepdim=True) / total)).view_as(squares)
    mean = squares.mean()
    return squares + _FLOOR * mean if mean > 0 else torch.ones_like(squares)


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((a[name].to(torch.float64) * b[name]).sum() for name in a))


@contextmanager
def _differentiable() -> Iterator[None]:
    """Without the fused kernels of attention, which cannot be differentiated forward."""
    with watching([Handle.of()]), sdpa_kernel(SDPBackend.MATH):
        yield
