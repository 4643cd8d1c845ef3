"""Refit the whole network by its outputs, at any size: the last step after the blocks.

Blocks are refitted one by one, each toward its own dense output. Here all kept weights, biases and
norm gains move together toward the network's output. For Hugging Face outputs with `logits` the
distance is the Kullback–Leibler divergence from the dense network's answer probabilities. For all
others it is the squared distance, relative to the dense output. It needs no labels.

Dense outputs are computed again in every step: those of a language model would not fit into memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.blocks import KEPT_BACK, cast, held_out_whole, rows_of, shapes
from lobs.calibration.forward import batch_size, call, evaluating, main_output
from lobs.layers import Layer
from lobs.pruning.refit.descent import (
    Piece,
    Schedule,
    cut,
    descend,
    free_parameters,
    random_signs,
    separable,
)
from lobs.pruning.refit.joint import JointRefit

SCHEDULE = Schedule(epochs=2, steps=32, rate=0.003)


def refit_outputs(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
) -> JointRefit:
    """Refit the kept weights of a network in place; zeros and layers that are not pruned stay.

    Args:
        model: the pruned network.
        dense: the network as it was given.
        batches: the calibration data.
        layers: the pruned network's layers.
        masks: True where a weight is kept, by parameter name.
    """
    work = copy.deepcopy(model).to(torch.float32)
    free = free_parameters(work, layers, masks)
    with evaluating(dense), evaluating(work):
        distance = _OutputDistance(work, dense, list(batches))
        if not process_group().sum_numbers(float(len(distance.held)))[0]:
            return JointRefit(reason="no sample could be held out")
        found = descend(model, work, free, distance, SCHEDULE, "refit")
    if found.reason:
        return JointRefit(reason=found.reason)
    if not math.isfinite(found.before):
        return JointRefit(reason=f"the {distance.measure} is {found.before:g}")
    return JointRefit(
        found.epochs, found.before, found.after, found.held_out, measure=distance.measure
    )


class _OutputDistance:
    """The distance of a network's output from the dense one's."""

    def __init__(self, work: nn.Module, dense: nn.Module, batches: Sequence[Any]) -> None:
        self.dense, self.batches = dense, batches
        self.measure = self._measure()
        group, counts = process_group(), [batch_size(batch) for batch in batches]
        numbers = group.all_gather(len(batches))
        total, first = sum(numbers), sum(numbers[: group.rank])
        whole = [Piece(i, range(n)) for i, n in enumerate(counts)]
        together = not all(group.all_gather(self._separable(work, whole)))
        fit, held = list[Piece](), list[Piece]()
        for number, (piece, n) in enumerate(zip(whole, counts, strict=True), start=first):
            edge = 0 if held_out_whole(number, total) else n
            if total < KEPT_BACK and not together and n >= KEPT_BACK:
                edge = n - n // KEPT_BACK
            fit += [Piece(piece.sample, range(edge))] if edge else []
            held += [Piece(piece.sample, range(edge, n))] if edge < n else []
        (rows,) = group.sum_numbers(float(sum(len(piece.rows) for piece in fit)))
        self.rows = max(1, math.floor(rows / SCHEDULE.steps / group.size))
        self.steps: int | None = None
        self.fit: Sequence[Piece] = fit if together else cut(fit, self.rows)
        self.held: Sequence[Piece] = held if together else cut(held, self.rows)

    def loss(self, work: nn.Module, piece: Piece) -> Tensor:
        """See `Objective`."""
        far, _ = self._far(work, piece)
        return far

    def probe(self, work: nn.Module, piece: Piece, generator: torch.Generator) -> Tensor:
        """See `Objective`."""
        out = _output(call(work, cast(self._rows(piece), torch.float32)))
        signs = random_signs(out, generator)
        if self.measure == _KL:  # whose curvature in logits is diag p − p pᵀ for probabilities p
            p = out.detach().softmax(dim=-1)
            root = p.sqrt()
            signs = (signs * root - p * (signs * root).sum(dim=-1, keepdim=True)) / math.sqrt(2)
        return (signs * out).sum()

    @torch.no_grad()
    def distance(self, work: nn.Module) -> float:
        """See `Objective`."""
        pairs = [self._far(work, piece) for piece in self.held]
        far, size = process_group().sum_numbers(
            sum(float(a) for a, _ in pairs), sum(b for _, b in pairs)
        )
        return far / size if size else 0.0

    def _far(self, work: nn.Module, piece: Piece) -> tuple[Tensor, float]:
        """Return the summed distance on a piece, and what it is relative to."""
        batch = self._rows(piece)
        with torch.no_grad():
            wanted = _output(call(self.dense, batch))
        out = _output(call(work, cast(batch, torch.float32)))
        if self.measure == _KL:
            wanted, out = wanted.log_softmax(dim=-1), out.log_softmax(dim=-1)
            far = nn.functional.kl_div(out, wanted, log_target=True, reduction="sum")
            return far, float(wanted.numel() / wanted.shape[-1])
        return (out - wanted).square().sum(), float(wanted.square().sum())

    def _rows(self, piece: Piece) -> Any:
        batch = self.batches[piece.sample]
        plain = dict(batch) if isinstance(batch, Mapping) else batch
        return rows_of(plain, slice(piece.rows.start, piece.rows.stop), batch_size(batch))

    @torch.no_grad()
    def _measure(self) -> str:
        own = [hasattr(call(self.dense, batch), "logits") for batch in self.batches[:1]]
        found = process_group().all_gather(own)
        return _KL if all(x for some in found for x in some) else _SQUARED

    def _separable(self, work: nn.Module, pieces: Sequence[Piece]) -> bool:
        """Return whether rows are independent in one batch of every form."""
        forms = {shapes(self.batches[piece.sample]): piece for piece in pieces}
        return all(
            separable(lambda part: self._far(work, part)[0], piece) for piece in forms.values()
        )


_KL = "mean KL divergence"
_SQUARED = "relative squared deviation"


def _output(answer: Any) -> Tensor:
    out = main_output(answer)
    assert out is not None  # calibration has refused such a network
    return out.to(torch.float32)
