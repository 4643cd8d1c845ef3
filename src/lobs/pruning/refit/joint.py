"""All surviving weights moved together, so that the network's output, not each layer's own, comes nearest to the dense one's.

Layers are solved one by one: those behind can mend what a layer leaves over, those before it
cannot. Here all survivors θ move at once, to the least mean ‖f_θ(x) − f_dense(x)‖²: the
compensation of optimal brain surgery (Hassibi and Stork 1993) in the whole network's metric instead
of each layer's, by Gauss–Newton steps (`gauss_newton`) in a metric that knows each row's own
curvature (`preconditioning`). No labels; what the dense network answers is all there is to know.

Every step sees other samples, and an eighth of them is never worked on (`splitting`): the weights
that come nearest to the dense network there are the ones that stay. A step costs some forty passes
over its batches, so large networks go without unless asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.errors import LobsError
from lobs.pruning.refit.gauss_newton import (
    PASSES,
    ImpossibleError,
    Survivors,
    Window,
    differentiable,
    parameters_of,
)
from lobs.layers import Layer
from lobs._system.progress import track
from lobs.calibration.forward import batch_size, evaluating, length, plain_input
from lobs.pruning.refit.split import SMALL, some, split

Compensate: TypeAlias = Literal["layers", "network"]

# Multiply-adds that moving all weights together may take where nobody asked for it: some twenty
# seconds on two cores.
WORK = 1.2e12
_MOST = 12  # steps
# Equations to an unknown that a step works on, and the fewest samples: fewer are learned by heart.
_EQUATIONS, _FEWEST = 5.0, 1000
_ENOUGH = 64  # samples to try a network out on
_PATIENCE, _WORTH = 2, 0.002  # so many steps that take off less than this share are the end


@dataclass(frozen=True)
class Compensation:
    """What moving all weights together did to the output's root mean square distance from the dense one's.

    Measured on `kept_back` samples that it did not work on. `reason` says why it was not done,
    where it was not.
    """

    steps: int = 0
    before: float | None = None
    after: float | None = None
    kept_back: int = 0
    reason: str = ""
    tried: float | None = None  # the least that any step reached

    def __str__(self) -> str:
        if self.reason:
            return f"layer by layer ({self.reason})"
        reached = self.after if self.steps or self.tried is None else self.tried
        moved = f"output deviation {self.before:.4g} → {reached:.4g} on {self.kept_back:,} samples kept back"
        if not self.steps:
            return f"layer by layer, since moving all weights together did not help on these batches ({moved})"
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
    return Effort(
        0, each, f"moving all layers together would take some {_MOST * cost:.1g} multiply-adds"
    )


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

    `samples` is how many the batches hold in all, `madds` what one costs on its way through the
    network.
    """
    free = _free(layers, masks)
    kind = next(
        (
            t.dtype
            for t in parameters_of(model, free).values()
            if t.dtype not in (torch.float32, torch.float64)
        ),
        None,
    )
    if kind is not None:
        return Compensation(reason=f"weights are {str(kind).removeprefix('torch.')}")
    survivors = Survivors(model, dense, layers, free)
    try:
        with evaluating(model), evaluating(dense), differentiable():
            return _move(survivors, batches, samples, madds, work)
    except ImpossibleError as error:
        survivors.write(survivors.at)
        return Compensation(reason=str(error))


def _move(
    survivors: Survivors, batches: Iterable[Any], samples: int, madds: float, work: float | None
) -> Compensation:
    """Step until nothing more is won on the batches kept back, and leave the network at its best."""
    group = process_group()
    if None in group.all_gather(length(batches)):
        return Compensation(
            reason="how many batches there are is not known: give them in a list or a DataLoader"
        )
    unknowns = round(sum(float(mask.sum()) for mask in survivors.free.values()))
    plan = effort(unknowns, _outputs_a_sample(survivors, batches), madds, samples, work)
    if plan.reason:
        return Compensation(reason=plan.reason)
    share = -(-plan.samples // group.size)
    parted = split(survivors.dense, batches, share, (plan.steps + 1) * share)
    if parted is None:
        return Compensation(
            reason=f"give two batches at least, one of which is kept back, or one of {SMALL} samples or more"
        )
    with group.raise_together():
        kept = some(parted.kept_back(), plan.samples)
    kept_back = Window(survivors, kept, join=parted.joins)
    # Where a step works on all there is, every process works on all that it has, and on nothing
    # twice.
    everything = plan.samples >= int(samples * parted.portion)
    at_work = parted.at_work(forever=True)
    at = chosen = survivors.at
    first = before = best = kept_back.distance(at)
    if not kept_back.samples or not math.isfinite(first):
        return Compensation(
            reason="there is nothing on the batches kept back that could be compared"
        )
    steps, idle, tried = 0, 0, math.inf
    with track("compensate", plan.steps) as advance:
        for turn in range(plan.steps):
            with group.raise_together():
                now_at_work = list(parted.at_work()) if everything else some(at_work, share)
            survivors.write(at)
            at = Window(survivors, now_at_work, join=parted.joins).step(at, turn)
            now = kept_back.distance(at)
            advance(1)
            tried = min(tried, now)
            if now < best:
                best, chosen, steps = now, at, turn + 1
            idle = 0 if now < (1 - _WORTH) * before else idle + 1
            before = min(before, now)
            if idle == _PATIENCE:
                break
    chosen = {name: t.contiguous() for name, t in chosen.items()}
    group.broadcast(*chosen.values())  # so that all processes have the same bits
    survivors.write(chosen)
    return Compensation(steps, first, best, kept_back.samples, tried=tried)


def _outputs_a_sample(survivors: Survivors, batches: Iterable[Any]) -> float:
    """How many numbers the network gives for one sample; also a first try whether it can be differentiated."""
    with process_group().raise_together():
        first = _little(next(iter(batches), None))
    counted, seen, fault = 0, 0, ""
    if first is not None:
        try:
            counted, seen = survivors.try_out(first), batch_size(first)
        except (ImpossibleError, LobsError, RuntimeError) as error:
            fault = " ".join(str(error).split())[:200]
    faults = [word for word in process_group().all_gather(fault) if word]
    if faults:
        raise ImpossibleError(f"the network cannot be differentiated forward and back: {faults[0]}")
    total, samples = process_group().sum_numbers(counted, seen)
    return total / max(1.0, samples)


def _little(batch: Any) -> Any:
    """The first samples of a batch: derivatives of a whole one may take more memory than there is."""
    x = plain_input(batch)
    return batch if x is None else x[:_ENOUGH]


def _free(layers: Sequence[Layer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which numbers of which parameters may move: those of these layers that are kept."""
    free: dict[str, Tensor] = {}
    for layer in layers:
        for (name, (start, stop)), whole in zip(
            layer.parameters().items(), layer.tensors(), strict=True
        ):
            mask = free.setdefault(
                name, torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
            )
            mask[start:stop] = masks[name][start:stop].to(mask.device) if name in masks else True
    return free
