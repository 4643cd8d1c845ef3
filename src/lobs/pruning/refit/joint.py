"""The joint refit: all surviving weights move together toward the dense network's output.

Layers are solved one by one. A later layer can compensate the error of an earlier one, but not the
other way round. Here all survivors θ move at once, to the least mean ‖f_θ(x) − f_dense(x)‖². That
is the compensation of optimal brain surgery (Hassibi and Stork 1993) in the metric of the whole
network. It takes Gauss–Newton steps (`gauss_newton`), preconditioned by each row's own curvature
(`preconditioner`), and needs no labels.

Every step sees other samples. One sample in eight is held out (`split`): the weights that come
nearest to the dense network there stay. A step costs about forty passes over its batches, so large
networks are refitted only on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.forward import batch_size, evaluating, length, plain_input
from lobs.errors import LobsError
from lobs.layers import Layer
from lobs.pruning.refit.gauss_newton import (
    PASSES,
    ImpossibleError,
    Survivors,
    Window,
    differentiable,
    parameters_of,
)
from lobs.pruning.refit.split import SMALL, some, split

Refit: TypeAlias = Literal["layers", "blocks", "network"]
T = TypeVar("T")

# Multiply-adds that the refit may take where nobody asked for it: about 20 s on two cores.
WORK = 1.2e12
_MOST_STEPS = 12
_EQUATIONS_PER_UNKNOWN = 5.0
_FEWEST_SAMPLES = 1000  # of a step; with fewer the refit overfits
_TRIAL_SAMPLES = 64  # to find out whether the network can be differentiated
_PATIENCE = 2  # steps that may win less than _WORTH of the distance before the refit ends
_WORTH = 0.002
_ASTRAY = 0.1  # share of the least distance by which a step may lead away; then the refit ends
_FEWEST_OUTPUTS = 0.005  # for every free weight; fewer do not determine them


@dataclass(frozen=True)
class JointRefit:
    """The effect of a joint refit on the output's root mean square distance from the dense output.

    `before`, `after` and `tried`, the least distance of any step, are measured on `held_out`
    samples that no step worked on. `reason` says why no refit was made, `measure` what was
    measured where it was not that distance.
    """

    steps: int = 0
    before: float | None = None
    after: float | None = None
    held_out: int = 0
    reason: str = ""
    tried: float | None = None
    measure: str = "output deviation"

    def __str__(self) -> str:
        if self.reason:
            return f"layer by layer ({self.reason})"
        reached = self.after if self.steps or self.tried is None else self.tried
        moved = (
            f"{self.measure} {self.before:.4g} → {reached:.4g} on {self.held_out:,} held-out "
            "samples"
        )
        if not self.steps:
            return f"layer by layer: the joint refit did not help on held-out samples ({moved})"
        return f"all layers jointly, {self.steps} steps ({moved})"


@dataclass(frozen=True)
class Effort:
    """Number of steps, and of samples that each works on; `reason` if there are none."""

    steps: int
    samples: int
    reason: str = ""


def effort(free: int, outputs: float, madds: float, samples: int, work: float | None) -> Effort:
    """Return how many steps to take.

    Args:
        free: number of weights that may move.
        outputs: numbers that the network returns for one sample.
        madds: multiply-adds of one sample.
        samples: number of samples there are.
        work: multiply-adds that may be spent in all; None for no limit.
    """
    wanted = max(_FEWEST_SAMPLES, math.ceil(_EQUATIONS_PER_UNKNOWN * free / max(1.0, outputs)))
    each = min(wanted, samples)
    if samples * outputs < _FEWEST_OUTPUTS * free:
        reason = f"{samples * outputs:,.0f} outputs are too few for {free:,} free weights"
        return Effort(0, each, reason)
    cost = PASSES * madds * each
    steps = _MOST_STEPS if work is None else min(_MOST_STEPS, int(work / max(1.0, cost)))
    if steps:
        return Effort(steps, each)
    return Effort(
        0, each, f"the joint refit would take about {_MOST_STEPS * cost:.1g} multiply-adds"
    )


def affordable(madds: float, samples: int, work: float | None) -> bool:
    """Return whether one step on the fewest samples fits into the work that may be spent.

    Args:
        madds: multiply-adds of one sample.
        samples: number of samples there are.
        work: multiply-adds that may be spent in all; None for no limit.
    """
    return work is None or PASSES * madds * min(_FEWEST_SAMPLES, samples) <= work


def refit_jointly(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
    *,
    samples: int,
    madds: float,
    work: float | None = WORK,
) -> JointRefit:
    """Refit the kept weights of some layers in place; zeros and everything else stay.

    Args:
        model: the pruned network.
        dense: the network as it was given.
        batches: the calibration data.
        layers: the pruned network's layers whose weights may move.
        masks: True where a weight is kept, by parameter name.
        samples: number of samples in all batches.
        madds: multiply-adds of one sample.
        work: multiply-adds that may be spent in all; None for no limit.
    """
    free = kept_entries(layers, masks)
    kind = next(
        (
            t.dtype
            for t in parameters_of(model, free).values()
            if t.dtype not in (torch.float32, torch.float64)
        ),
        None,
    )
    if kind is not None:
        return JointRefit(reason=f"weights are {str(kind).removeprefix('torch.')}")
    survivors = Survivors(model, dense, layers, free)
    try:
        with evaluating(model), evaluating(dense), differentiable(model):
            return _move(survivors, batches, samples, madds, work)
    except ImpossibleError as error:
        survivors.write(survivors.at)
        return JointRefit(reason=str(error))


def _move(
    survivors: Survivors, batches: Iterable[Any], samples: int, madds: float, work: float | None
) -> JointRefit:
    """Step until the held-out distance stops falling, and leave the network at its best."""
    group = process_group()
    if None in group.all_gather(length(batches)):
        return JointRefit(reason="the number of batches is not known: give a list or a DataLoader")
    unknowns = round(sum(float(mask.sum()) for mask in survivors.free.values()))
    with group.raise_together():
        first_few = _little(next(iter(batches), None))
    plan = effort(unknowns, _outputs_a_sample(survivors, first_few), madds, samples, work)
    if plan.reason:
        return JointRefit(reason=plan.reason)
    _try_out(survivors, first_few)
    share = -(-plan.samples // group.size)
    parted = split(survivors.dense, batches, share, (plan.steps + 1) * share)
    if parted is None:
        return JointRefit(
            reason="one batch must be held out: give two batches at least, or one of "
            f"{SMALL} samples or more"
        )
    with group.raise_together():
        aside = some(parted.kept_back(), plan.samples)
    held_out = Window(survivors, aside, join=parted.joins)
    # A step that needs all samples takes each one once, in every process.
    everything = plan.samples >= int(samples * parted.portion)
    at_work = parted.at_work(forever=True)
    at = chosen = survivors.at
    first = before = best = held_out.distance(at)
    if not held_out.samples or not math.isfinite(first):
        return JointRefit(reason="the held-out batches hold nothing to compare")
    steps, idle, tried = 0, 0, math.inf
    with track("refit", plan.steps) as advance:
        for turn in range(plan.steps):
            with group.raise_together():
                now_at_work = list(parted.at_work()) if everything else some(at_work, share)
            survivors.write(at)
            at = Window(survivors, now_at_work, join=parted.joins).step(at, turn)
            now = held_out.distance(at)
            advance(1)
            tried = min(tried, now)
            if now < best:
                best, chosen, steps = now, at, turn + 1
            idle = 0 if now < (1 - _WORTH) * before else idle + 1
            before = min(before, now)
            if idle == _PATIENCE or now > (1 + _ASTRAY) * best:
                break
    chosen = {name: t.contiguous() for name, t in chosen.items()}
    group.broadcast(*chosen.values())  # so that all processes have the same bits
    survivors.write(chosen)
    return JointRefit(steps, first, best, held_out.samples, tried=tried)


def _outputs_a_sample(survivors: Survivors, first: Any) -> float:
    """Return how many numbers the network gives for one sample.

    Args:
        survivors: the free weights.
        first: some samples; None in a process without data.
    """
    counted = _tried(lambda: 0 if first is None else survivors.outputs(first))
    seen = 0 if first is None else batch_size(first)
    total, samples = process_group().sum_numbers(counted, seen)
    return total / max(1.0, samples)


def _try_out(survivors: Survivors, first: Any) -> None:
    """Raise where the network cannot be differentiated; in all processes or in none."""
    _tried(lambda: None if first is None else survivors.try_out(first))


def _tried(work: Callable[[], T]) -> T:
    """Return what a function gives; raise in all processes where it fails in one."""
    fault, found = "", None
    try:
        found = work()
    except (ImpossibleError, LobsError, RuntimeError) as error:
        fault = " ".join(str(error).split())[:200]
    faults = [word for word in process_group().all_gather(fault) if word]
    if faults:
        raise ImpossibleError(f"the network cannot be differentiated forward and back: {faults[0]}")
    return cast(T, found)


def _little(batch: Any) -> Any:
    """Return a batch's first samples: derivatives of a whole batch may not fit into memory."""
    x = plain_input(batch)
    return batch if x is None else x[:_TRIAL_SAMPLES]


def kept_entries(layers: Sequence[Layer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which entries of which parameters may move: those of these layers that are kept."""
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
