"""Refit by blocks: all survivors of a block move together toward the dense block's output.

Layers are solved one by one, so an earlier layer cannot make room for what a later one must lose.
Once a block's layers are solved, its kept weights, biases and norm gains move at once. They see the
block's inputs in the pruned network and must give what the dense block gives in the dense network.
That also takes back errors of earlier blocks. It needs no labels.

The steps are Adam's (Kingma and Ba 2015) on a copy of the block in float32. A weight's step is
relative to the typical size of its tensor's survivors. One sample in eight is held out: the weights
that come nearest to the dense output there stay, and if none comes nearer, nothing moves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.blocks import Repeated, Sample, flowing, loaded
from lobs.layers import Layer

_EPOCHS = 4
_STEPS_AN_EPOCH = 32
_RATE = 0.03  # first step, relative to the root mean square of a tensor's survivors
_BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class BlockRefit:
    """The effect of refitting one block.

    `before` and `after` are squared distances from the dense block's output on held-out samples,
    relative to that output. `reason` says why nothing was tried.
    """

    name: str
    before: float = 0.0
    after: float = 0.0
    epochs: int = 0
    held_out: int = 0
    reason: str = ""

    @property
    def moved(self) -> bool:
        """Return whether the block's weights moved."""
        return self.epochs > 0


@dataclass(frozen=True)
class BlockRefits:
    """The effect of refitting a network block by block."""

    blocks: tuple[BlockRefit, ...]

    @property
    def reason(self) -> str:
        """Return why nothing was tried; empty where some block was."""
        reasons = {block.reason for block in self.blocks}
        return "" if "" in reasons else next(iter(reasons), "")

    @property
    def steps(self) -> int:
        """Return the number of blocks that moved."""
        return sum(block.moved for block in self.blocks)

    def __str__(self) -> str:
        moved = [block for block in self.blocks if block.moved]
        if self.reason:
            return f"layer by layer ({self.reason})"
        if not moved:
            return "layer by layer: no block came nearer to the dense one on held-out samples"
        ratio = math.exp(sum(math.log(b.after / b.before) for b in moved) / len(moved))
        return (
            f"block by block, {len(moved)} of {len(self.blocks)} blocks (squared distance from the "
            f"dense blocks × {ratio:.2f} on {moved[0].held_out:,} held-out samples)"
        )


def refit_block(
    block: Repeated, layers: Sequence[Layer], masks: Mapping[str, Tensor]
) -> BlockRefit:
    """Refit one block in place; zeros and unpruned layers stay.

    Args:
        block: the block, whose layers are solved.
        layers: its pruned layers.
        masks: True where a weight is kept, by parameter name.
    """
    samples = block.samples()
    work = copy.deepcopy(block.module).to(torch.float32)
    free = _free(work, block.name, layers, masks)
    pieces = _pieces(work, samples)
    fit, held = pieces.split()
    if not free or not process_group().sum_numbers(float(len(held)))[0]:
        return BlockRefit(block.name, reason="no sample could be held out")
    before = best = pieces.distance(work, held)
    if not 0 < before < math.inf:
        return BlockRefit(block.name, before, before, reason="its output is right already")
    chosen, epochs = None, 0
    with track(f"blocks of {block.name}", _EPOCHS) as advance:
        for epoch in _adam(work, free, pieces, fit):
            now = pieces.distance(work, held)
            advance(1)
            if now < best:
                best, epochs = now, epoch
                chosen = {name: parameter.detach().clone() for name, parameter, _ in free}
    if chosen is not None:
        process_group().broadcast(*chosen.values())  # so that all processes have the same bits
        own = dict(block.module.named_parameters())
        for name, value in chosen.items():
            own[name].data.copy_(value)
    rows = round(process_group().sum_numbers(float(sum(len(p.rows) for p in held)))[0])
    return BlockRefit(block.name, before, best, epochs, rows)


Free = list[tuple[str, nn.Parameter, Tensor | None]]


def _free(
    work: nn.Module, block: str, layers: Sequence[Layer], masks: Mapping[str, Tensor]
) -> Free:
    """Return the parameters that may move, each with its mask; all others are frozen."""
    prefix = f"{block}."
    pruned = {name.removeprefix(prefix) for layer in layers for name in layer.parameters()}
    found: Free = []
    for name, parameter in work.named_parameters():
        moves = name in pruned or parameter.dim() == 1
        parameter.requires_grad_(moves)
        if moves:
            mask = masks.get(prefix + name)
            found.append((name, parameter, None if mask is None else mask.to(parameter.device)))
    return found


@dataclass(frozen=True)
class _Piece:
    sample: int
    rows: range


@dataclass(frozen=True)
class _Pieces:
    """The samples of a block in pieces of a few rows; `energy` is the dense output's."""

    samples: Sequence[Sample]
    every: Sequence[_Piece]
    energy: float

    def split(self) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces to fit to and the held-out ones."""
        out = [
            [p for p in self.every if self.samples[p.sample].held_out is held]
            for held in (False, True)
        ]
        return out[0], out[1]

    def loss(self, work: nn.Module, piece: _Piece) -> Tensor:
        """Return the squared distance from the dense output, summed over a piece."""
        sample = self.samples[piece.sample]
        x, wanted = loaded(sample.inputs), loaded(sample.wanted)
        rows = slice(piece.rows.start, piece.rows.stop)
        arguments = sample.arguments.rows(rows, len(x)).to(torch.float32)
        out = flowing(arguments.run(work, x[rows].to(torch.float32, copy=True)))
        assert out is not None
        far: Tensor = (out - wanted[rows].to(torch.float32)).square().sum()
        return far

    @torch.no_grad()
    def distance(self, work: nn.Module, pieces: Sequence[_Piece]) -> float:
        """Return the relative squared distance from the dense output over some pieces."""
        far, energy = 0.0, 0.0
        for piece in pieces:
            far += float(self.loss(work, piece))
            wanted = loaded(self.samples[piece.sample].wanted)
            energy += float(wanted[piece.rows.start : piece.rows.stop].double().square().sum())
        far, energy = process_group().sum_numbers(far, energy)
        return far / energy if energy else 0.0


def _pieces(work: nn.Module, samples: Sequence[Sample]) -> _Pieces:
    """Cut batches into pieces for one step, where the block treats rows independently."""
    counts = [len(loaded(sample.inputs)) for sample in samples]
    energy = sum(float(loaded(s.wanted).double().square().mean()) for s in samples)
    whole = _Pieces(samples, [_Piece(i, range(n)) for i, n in enumerate(counts)], energy)
    alone = bool(samples) and counts[0] > 1 and _separable(work, whole)
    if not all(process_group().all_gather(alone or not samples or counts[0] == 1)):
        return whole
    rows = sum(n for n, sample in zip(counts, samples, strict=True) if not sample.held_out)
    total = process_group().sum_numbers(float(rows))[0]
    each = max(1, math.floor(total / _STEPS_AN_EPOCH))
    cut = [
        _Piece(i, range(row, min(n, row + each)))
        for i, n in enumerate(counts)
        for row in range(0, n, each)
    ]
    return _Pieces(samples, cut, energy)


@torch.no_grad()
def _separable(work: nn.Module, pieces: _Pieces) -> bool:
    """Return whether a block gives for the last row alone what it gives for it in its batch."""
    whole = pieces.every[0]
    rows = [_Piece(0, range(row, row + 1)) for row in whole.rows]
    try:
        alone = sum(float(pieces.loss(work, row)) for row in rows)
    except Exception:  # the user's block may refuse a single row in any way
        return False
    together = float(pieces.loss(work, whole))
    return math.isclose(alone, together, rel_tol=1e-3)


def _adam(work: nn.Module, free: Free, pieces: _Pieces, fit: Sequence[_Piece]) -> Iterator[int]:
    """Take one epoch of steps after another; yield the number of epochs done."""
    group = process_group()
    rates = [_RATE * _typical(parameter, mask) for _, parameter, mask in free]
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": rate} for (_, p, _), rate in zip(free, rates, strict=True)],
        betas=_BETAS,
    )
    total = group.sum_numbers(float(sum(len(p.rows) for p in fit)))[0]
    each = max(1, math.floor(total / _STEPS_AN_EPOCH / group.size))
    generator = torch.Generator().manual_seed(0)
    done, scale = 0, 1.0 / max(pieces.energy, 1e-30)
    for epoch in range(_EPOCHS):
        steps = _joined([fit[i] for i in torch.randperm(len(fit), generator=generator)], each)
        number = max(group.all_gather(len(steps)))
        for index in range(number):
            _rate(optimizer, rates, done / (_EPOCHS * number))
            optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                for piece in steps[index] if index < len(steps) else ():
                    (scale * pieces.loss(work, piece)).backward()  # type: ignore[no-untyped-call]
            for _, parameter, mask in free:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if mask is not None:
                    parameter.grad.mul_(mask)
            group.all_reduce(*(p.grad for _, p, _ in free if p.grad is not None))
            optimizer.step()
            done += 1
        yield epoch + 1


def _rate(optimizer: torch.optim.Optimizer, rates: Sequence[float], progress: float) -> None:
    """Set the steps' size: a half cosine from the first to nothing."""
    factor = 0.5 * (1 + math.cos(math.pi * progress))
    for parameters, rate in zip(optimizer.param_groups, rates, strict=True):
        parameters["lr"] = rate * factor


def _typical(parameter: Tensor, mask: Tensor | None) -> float:
    kept = parameter.numel() if mask is None else int(mask.sum())
    return math.sqrt(float(parameter.detach().double().square().sum()) / max(1, kept))


def _joined(pieces: Sequence[_Piece], rows: int) -> list[list[_Piece]]:
    """Join pieces to steps of about `rows` rows."""
    steps: list[list[_Piece]] = [[]]
    for piece in pieces:
        if sum(len(p.rows) for p in steps[-1]) >= rows:
            steps.append([])
        steps[-1].append(piece)
    return [step for step in steps if step]
