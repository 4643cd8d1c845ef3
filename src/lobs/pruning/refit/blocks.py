"""Refit by blocks: all survivors of a block move together toward the dense block's output.

Layers are solved one by one, so an earlier layer cannot make room for what a later one must lose.
Once a block's layers are solved, its kept weights, biases and norm gains move at once. They see the
block's inputs in the pruned network and must give what the dense block gives in the dense network.
That also takes back errors of earlier blocks. It needs no labels.

One sample in eight is held out and decides what stays (`descent`). A step sees as many samples as
its free weights need. Images give many outputs each, so a few images are enough. Where the
processor multiplies bfloat16 faster, steps are computed in it. Held-out samples are judged in
float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.blocks import Repeated, Sample, flowing, loaded
from lobs.calibration.forward import positions
from lobs.layers import Layer
from lobs.pruning.refit.descent import (
    Free,
    Piece,
    Schedule,
    cut,
    descend,
    free_parameters,
    random_signs,
    separable,
)
from lobs.pruning.refit.exchange import Exchange
from lobs.pruning.refit.joint import JointRefit
from lobs.solvers import linalg

SCHEDULE = Schedule(epochs=3, steps=32, rate=0.07, betas=(0.9, 0.95))
_OUTPUTS_PER_WEIGHT = 4.0  # outputs in one step for every free weight; more teach little
WORK_BYTES = 32  # of a block's weight: copy, gradient, Adam's two, step, size, exact and best
_LEAST_ENERGY = 0.1  # of a position, relative to its row's median; a smaller one counts as this
_FEWEST_ROWS = 4  # of one step, where there are more
_ROUNDING = 0.02  # share of the distance that rounding to bfloat16 may change


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
    """The effect of refitting a network block by block, and then perhaps as a whole."""

    blocks: tuple[BlockRefit, ...]
    whole: JointRefit | None = None

    @property
    def reason(self) -> str:
        """Return why nothing was tried; empty where some block was."""
        reasons = [block.reason for block in self.blocks]
        return "" if "" in reasons or not reasons else reasons[0]

    @property
    def steps(self) -> int:
        """Return the number of blocks that moved, and of the whole network's epochs."""
        later = self.whole.steps if self.whole is not None else 0
        return sum(block.moved for block in self.blocks) + later

    def __str__(self) -> str:
        then = "" if self.whole is None else f"; {self._then(self.whole)}"
        if not self.blocks and self.whole is not None:
            return str(self.whole)
        moved = [block for block in self.blocks if block.moved]
        if self.reason:
            return f"layer by layer ({self.reason}){then}"
        if not moved:
            return (
                f"layer by layer: no block came nearer to the dense one on held-out samples{then}"
            )
        logs = [math.log(max(b.after / b.before, 1e-30)) for b in moved]
        ratio = math.exp(sum(logs) / len(moved))
        return (
            f"block by block, {len(moved)} of {len(self.blocks)} blocks (squared distance from the "
            f"dense blocks × {ratio:.2f} on {moved[0].held_out:,} held-out samples){then}"
        )

    @staticmethod
    def _then(whole: JointRefit) -> str:
        if whole.reason:
            return f"not by the outputs ({whole.reason})"
        moved = (
            f"{whole.measure} {whole.before:.4g} → {whole.after:.4g} on {whole.held_out:,} "
            "held-out samples"
        )
        if not whole.steps:
            return f"a refit by the outputs did not help ({moved})"
        return f"then all layers by the outputs, {whole.steps} epochs ({moved})"


def refit_block(
    block: Repeated,
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
    shared: Collection[str] = (),
    exchange: Exchange | None = None,
) -> BlockRefit:
    """Refit one block in place; layers that are not pruned stay, and so do zeros but for exchanges.

    Args:
        block: the block, whose layers are solved.
        layers: its pruned layers.
        masks: True where a weight is kept, by parameter name.
        shared: names of the block's parameters that are used elsewhere too, which stay.
        exchange: weights that may change places; its masks are written.
    """
    work = copy.deepcopy(block.module).to(torch.float32)
    free = free_parameters(work, layers, masks, f"{block.name}.", shared)
    if not free:
        return BlockRefit(block.name, reason="it has no layers to prune")
    distance = _BlockDistance(work, block.samples(), free)
    if not distance.held_energy:
        return BlockRefit(block.name, reason="no sample could be held out")
    label = f"blocks of {block.name}"
    found = descend(block.module, work, free, distance, SCHEDULE, label, exchange)
    if found.reason:
        return BlockRefit(block.name, reason=found.reason)
    if not 0 < found.before < math.inf:
        return BlockRefit(block.name, reason=f"its deviation is {found.before:g}")
    return BlockRefit(block.name, found.before, found.after, found.epochs, found.held_out)


class _BlockDistance:
    """The squared distance of a block's output from the dense block's, relative to the latter.

    In sequences it is relative at every position.
    """

    def __init__(self, work: nn.Module, samples: Sequence[Sample], free: Free) -> None:
        self.samples = samples
        counts = [sample.inputs.shape[0] for sample in samples]
        held = [sample for sample in samples if sample.held_out]
        group = process_group()
        total, size, self.held_energy = group.sum_numbers(
            float(sum(counts) - sum(sample.inputs.shape[0] for sample in held)),
            float(sum(map(_numbers, held))),
            sum(_energy(loaded(x.wanted), positions(x.wanted, x.masks)) for x in held),
        )
        # Adam's steps do not depend on the loss's scale, as long as float32 holds the gradients.
        self._scale = size / max(self.held_energy, 1e-30)
        even, enough = total / SCHEDULE.steps, _enough_rows(samples, free)
        self.rows = max(1, math.floor(min(even, enough) / group.size))
        self.steps = SCHEDULE.steps if enough < even else None
        pieces = [Piece(i, range(n)) for i, n in enumerate(counts)]
        if all(group.all_gather(self._separable(work, pieces))):
            pieces = cut(pieces, self.rows)
        self.fit: Sequence[Piece] = [p for p in pieces if not samples[p.sample].held_out]
        self.held: Sequence[Piece] = [p for p in pieces if samples[p.sample].held_out]
        self._half = all(group.all_gather(self._bears_half(work)))

    def loss(self, work: nn.Module, piece: Piece) -> Tensor:
        """See `Objective`."""
        return self._scale * self._squared(work, piece, self._half)

    def probe(self, work: nn.Module, piece: Piece, generator: torch.Generator) -> Tensor:
        """See `Objective`."""
        out, goal, mask = self._outputs(work, piece, self._half)
        signs = random_signs(goal, generator)
        return math.sqrt(self._scale) * (_by_size(signs, goal, mask) * out).sum()

    @torch.no_grad()
    def distance(self, work: nn.Module) -> float:
        """See `Objective`."""
        far = sum(float(self._squared(work, piece)) for piece in self.held)
        (far,) = process_group().sum_numbers(far)
        return far / self.held_energy if self.held_energy else 0.0

    def _squared(self, work: nn.Module, piece: Piece, half: bool = False) -> Tensor:
        out, goal, mask = self._outputs(work, piece, half)
        far: Tensor = _by_size(out - goal, goal, mask).square().sum()
        return far

    def _outputs(
        self, work: nn.Module, piece: Piece, half: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the block's output on a piece, the dense block's, and the mask of padding.

        Args:
            work: the block.
            piece: some rows.
            half: multiply in bfloat16.
        """
        sample = self.samples[piece.sample]
        rows = slice(piece.rows.start, piece.rows.stop)
        x, goal = loaded(sample.inputs[rows]), loaded(sample.wanted[rows]).to(torch.float32)
        arguments = sample.arguments.rows(rows, sample.inputs.shape[0]).to(torch.float32)
        kind = goal.device.type
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False) if half else nullcontext():
            out = flowing(arguments.run(work, x.to(torch.float32, copy=True), sample.seed))
        assert out is not None
        out = out.to(torch.float32)
        mask = positions(sample.wanted, sample.masks)
        return out, goal, None if mask is None else mask[rows].to(goal.device)

    def _bears_half(self, work: nn.Module) -> bool:
        """Return whether bfloat16 is faster here, and fine enough for this block's deviation."""
        if not self.fit:  # this process takes no step
            return True
        if not fast_bfloat16(loaded(self.samples[0].wanted).device):
            return False
        try:
            with torch.no_grad():
                exact = float(self._squared(work, self.fit[0]))
            with torch.enable_grad():
                rounded = self._squared(work, self.fit[0], half=True)
                rounded.backward()  # type: ignore[no-untyped-call]
        except Exception:  # the user's block may need one type in any way
            return False
        finally:
            work.zero_grad(set_to_none=True)
        return math.isclose(exact, float(rounded), rel_tol=_ROUNDING)

    def _separable(self, work: nn.Module, pieces: Sequence[Piece]) -> bool:
        """Return whether rows are independent in one sample of every form."""
        forms = {self.samples[piece.sample].form: piece for piece in pieces}
        return all(separable(partial(self._squared, work), piece) for piece in forms.values())


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices faster in bfloat16 than in float32.

    Only CPUs are asked: elsewhere nothing was measured.
    """
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # as torch itself asks
    known = (getattr(torch.cpu, name, None) for name in asked)
    return device.type == "cpu" and any(ask is not None and ask() for ask in known)


def _by_size(far: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """Divide deviations in sequences by the size of each position's features.

    Norms stand between the blocks of a transformer, so a deviation counts by its share of the
    position. Single tokens can be a thousand times larger than all others.

    Args:
        far: the deviations.
        wanted: the dense block's output.
        mask: True where a position is no padding; deviations are zero elsewhere.
    """
    if mask is not None:
        far = far.masked_fill(~mask.view(*mask.shape, *[1] * (far.dim() - 2)), 0)
    if wanted.dim() != 3:
        return far
    each = wanted.square().mean(dim=-1, keepdim=True)
    if mask is None:
        typical = each.median(dim=1, keepdim=True).values
    else:
        real = each.masked_fill(~mask.unsqueeze(-1), torch.nan)
        typical = real.nanmedian(dim=1, keepdim=True).values.nan_to_num()
    return far / each.maximum(_LEAST_ENERGY * typical + 1e-30).sqrt()


def _energy(wanted: Tensor, mask: Tensor | None = None) -> float:
    wanted = wanted.to(torch.float32)
    return linalg.energy(_by_size(wanted, wanted, mask))


def _numbers(sample: Sample) -> int:
    """Return how many numbers the dense block's output has, without padded positions."""
    mask, shape = positions(sample.wanted, sample.masks), sample.wanted.shape
    return math.prod(shape) if mask is None else int(mask.sum()) * math.prod(shape[2:])


def _enough_rows(samples: Sequence[Sample], free: Free) -> float:
    """Return how many rows one step needs, in all processes."""
    weights = sum(p.numel() if mask is None else int(mask.sum()) for _, p, mask in free)
    outputs = math.prod(samples[0].wanted.shape[1:]) if samples else 0
    most: int = max(process_group().all_gather(outputs))
    return max(_FEWEST_ROWS, math.ceil(_OUTPUTS_PER_WEIGHT * weights / max(1, most)))
