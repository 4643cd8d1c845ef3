"""Stream the second moments of a layer's inputs.

Products are formed in the activation's own precision, at least float32, over pieces of at most
8,192 vectors. They are added up in float64. A float32 sum of millions of patches would lose the
small eigenvalues that decide which weights can be deleted. Float64 products would cost twice the
time for digits that the activations do not have.

Layers of under 32 columns are multiplied in float64 nevertheless. It costs nothing there, and
narrow float32 products are summed naively (measured error 4e-5 instead of 5e-7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.layers import Layer

_NARROW = 32  # columns below which float64 products are as fast
_LEAST_ENERGY = 1e-30  # sums of squares below this have lost digits in float32
_SYMMETRIC_FROM = 256  # columns from which computing only the upper blocks pays
_STRIP = 512  # rows of a moment that are worked on together


class Moments:
    """Hold the running sums Σ y yᵀ, Σ y and n of one layer, per group."""

    def __init__(
        self,
        groups: int,
        columns: int,
        *,
        bias: bool,
        device: torch.device | None = None,
        counts_only: bool = False,
    ) -> None:
        self.bias, self.count = bias, 0
        self.left_out = 0  # vectors that reached the layer and were not summed
        self.single_copy = memory.single_copy(groups, columns)
        kind = torch.float32 if self.single_copy else torch.float64
        # The constant-1 column has its place from the start, so that no copy is needed for it.
        size = 0 if counts_only else columns + bias
        self._whole = torch.zeros(groups, size, size, dtype=kind, device=device)
        self._sum = torch.zeros(groups, columns, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, layer: Layer, device: torch.device, *, counts_only: bool = False) -> Moments:
        """Return empty moments for a layer's inputs.

        Args:
            layer: the layer.
            device: where the sums are kept.
            counts_only: only count vectors; the sums stay empty.
        """
        return cls(
            layer.groups,
            layer.columns,
            bias=layer.bias is not None,
            device=device,
            counts_only=counts_only,
        )

    @property
    def _outer(self) -> Tensor:
        columns = self._sum.shape[1]
        return self._whole[:, :columns, :columns]

    def add(self, patches: Tensor) -> None:
        """Add vectors of shape (groups, n, columns)."""
        precise = patches.dtype == torch.float64 or patches.shape[-1] < _NARROW
        y = patches.to(torch.float64 if precise else torch.float32)
        outer = self._outer
        if len(y) > 1 and y.shape[-1] < _SYMMETRIC_FROM:
            # One product for all groups: a depthwise convolution has a thousand of nine columns.
            outer += _product(y, y)
        else:
            for g, vectors in enumerate(y):
                _add_gram(outer[g], vectors)
        self._sum += y.sum(dim=1, dtype=torch.float64)
        self.count += y.shape[1]

    def note(self, x: Tensor, vectors: int) -> None:
        """Count vectors without making them, and check that the whole input is finite."""
        total = x.sum()
        if not bool(torch.isfinite(total)):  # the input's own type may have overflowed
            total = x.sum(dtype=torch.float64)
        self._sum += 0.0 * total.to(self._sum)  # NaN from here on if the total is infinite
        self.count += vectors

    def packed(self) -> dict[str, Tensor]:
        """Return the sums as tensors; `unpacked` restores them to the bit."""
        return {
            "whole": self._whole,
            "sum": self._sum,
            "count": torch.tensor([self.count, self.left_out]),
        }

    @classmethod
    def unpacked(
        cls, parts: Mapping[str, Tensor], *, bias: bool, device: torch.device | None = None
    ) -> Moments:
        """Restore packed sums.

        Args:
            parts: the tensors of `packed`. Those on the device already are not copied.
            bias: whether the layer has a bias.
            device: where the sums are kept.
        """
        groups, columns = parts["sum"].shape
        moments = cls(groups, columns, bias=bias, device=device, counts_only=True)
        moments._whole = parts["whole"].to(moments._whole)
        moments._sum.copy_(parts["sum"])
        moments.count, moments.left_out = parts["count"].tolist()
        return moments

    def join(self) -> None:
        """Add up the sums of all processes of the group."""
        process_group().all_reduce(self._whole, self._sum)
        sums = process_group().sum_numbers(self.count, self.left_out)
        self.count, self.left_out = map(round, sums)

    @property
    def finite(self) -> bool:
        """Return whether no NaN or infinity has been added."""
        return bool(torch.isfinite(self._sum.sum() + self._outer.diagonal(dim1=-2, dim2=-1).sum()))

    @property
    def moment(self) -> Tensor:
        """Return Ψ = (1/n) Σ y yᵀ as (groups, columns, columns).

        With a bias, the constant-1 column is last.
        """
        return self._finished(self._whole.clone())

    def taken(self) -> Tensor:
        """Return Ψ in the memory of the sums, which are lost: no second copy is made."""
        return self._finished(self.emptied())

    def emptied(self) -> Tensor:
        """Return the sums of squares and keep only the other sums."""
        whole, self._whole = self._whole, self._whole[:, :0, :0].clone()
        return whole

    def _finished(self, whole: Tensor) -> Tensor:
        whole.div_(max(self.count, 1))
        columns = self._sum.shape[1]
        whole[:, :columns, columns:] = self.mean[:, :columns].unsqueeze(-1)
        whole[:, columns:, columns:] = 1
        for start in range(0, whole.shape[-1], _STRIP):  # mirror the upper triangle
            stop = start + _STRIP
            square = whole[:, start:stop, start:stop]
            square.copy_(torch.triu(square) + torch.triu(square, 1).mT)
            whole[:, stop:, start:stop] = whole[:, start:stop, stop:].mT
        return whole

    @property
    def mean(self) -> Tensor:
        """Return the mean input; with a bias, the constant 1 is last."""
        total = self._sum / max(self.count, 1)
        return torch.cat([total, torch.ones_like(total[:, :1])], dim=-1) if self.bias else total


def _add_gram(total: Tensor, y: Tensor) -> None:
    """Add YᵀY to the upper triangle of `total`.

    Wide matrices are added in block rows, which saves three products in eight.
    """
    d = y.shape[1]
    block = d if d < _SYMMETRIC_FROM else min(-(-d // 4), _STRIP)
    for left in range(0, d, block):
        total[left : left + block, left:] += _product(y[:, left : left + block], y[:, left:])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return AᵀB, where B begins with A's columns.

    Float64 is used where float32 cannot hold the squares, as with inputs of 1e±30.
    """
    product = a.mT @ b
    if a.dtype == torch.float64:
        return product
    energy = product.diagonal(dim1=-2, dim2=-1)
    lost = (
        a.transpose(-1, -2)[energy < _LEAST_ENERGY]
        if bool((energy < _LEAST_ENERGY).any())
        else a[..., :0]
    )
    if bool(torch.isfinite(energy).all()) and not bool(lost.any()):
        return product
    return a.double().mT @ b.double()


def weighed(layer: Layer) -> bool:
    """Return whether a layer's paired moments are summed as W D, with one line per row."""
    return memory.single_copy(layer.groups, layer.columns) or 2 * layer.rows < layer.columns


class PairedMoments:
    """Hold moments of one layer's inputs y in the dense and ŷ in the pruned network.

    They are Ĥ = E[ŷŷᵀ] and D = E[(y − ŷ)ŷᵀ]. D is summed as a difference, because E[yŷᵀ] − Ĥ loses
    it to rounding where y and ŷ are close. Only W D is ever needed. It is summed directly where
    that takes fewer products, or where a second d×d matrix would take too much memory.

    Args:
        layer: the layer.
        like: moments of a layer with the same inputs. They are summed once for both.
    """

    def __init__(self, layer: Layer, like: PairedMoments | None = None) -> None:
        self._like = like
        self._outer: Tensor
        self._sum: Tensor
        self.pruned: Moments = (
            Moments.of(layer, layer.weight.device) if like is None else like.pruned
        )
        self.held_out: PairedMoments | None = None  # the same of samples that are held out
        self.paired = True  # whether the same samples reached the layer in both networks
        self._weighed = weighed(layer)
        self._shared = like is not None and not self._weighed and not like._weighed
        if like is not None and self._shared:
            self._outer, self._sum = like._outer, like._sum
            return
        lines = layer.rows if self._weighed else layer.columns
        self._outer = self.pruned._whole.new_zeros(layer.groups, lines, layer.columns)
        self._sum = torch.zeros(
            layer.groups, lines, dtype=torch.float64, device=layer.weight.device
        )

    def add(self, layer: Layer, x: Tensor, x_hat: Tensor, *, step: int = 1, start: int = 0) -> None:
        """Add the input of one call.

        Args:
            layer: the layer, in the dense network.
            x: its input in the dense network.
            x_hat: its input in the pruned network.
            step: distance between the positions of an image that are taken.
            start: the first such position, modulo the step.
        """
        if layer.routed or x.shape != x_hat.shape:
            self.unpaired(layer, [x_hat])
            return
        if self._shared:
            return
        if torch.equal(x, x_hat):  # no layer before this one has been pruned
            for piece in layer.sampled(x_hat, step, start) if self._like is None else ():
                self.pruned.add(piece)
            return
        own = torch.promote_types(x.dtype, torch.float32)
        kind = torch.float64 if layer.columns < _NARROW else own
        weight = layer.unfolded(layer.weight.detach()).to(kind) if self._weighed else None
        # Patches are selections of the input, so a difference has the differences as its patches.
        for difference, pruned in zip(
            layer.sampled(x.to(own) - x_hat.to(own), step, start),
            layer.sampled(x_hat, step, start),
            strict=True,
        ):
            if self._like is None:
                self.pruned.add(pruned)
            moved = difference.to(kind)
            lines = moved if weight is None else moved @ weight.mT
            product = lines.mT @ pruned.to(kind)
            # Inputs of 1e±30 have products that float32 cannot hold.
            held = bool(torch.isfinite(product).all()) and bool(product.any())
            self._outer += product if held else lines.double().mT @ pruned.double()
            self._sum += lines.sum(dim=1, dtype=torch.float64)

    def unpaired(self, layer: Layer, inputs: Sequence[Tensor]) -> None:
        """Add inputs of the pruned network alone: other samples reached the dense layer.

        Experts get other tokens once layers before them are pruned. Such a layer is solved to give
        what its own dense weights give on its present inputs.

        Args:
            layer: the layer.
            inputs: its inputs in the pruned network.
        """
        self.paired = False
        for x_hat in inputs if self._like is None else ():
            for piece in layer.patches(x_hat):
                self.pruned.add(piece)

    def join(self) -> None:
        """Add up the sums of all processes of the group."""
        self.paired = all(process_group().all_gather(self.paired))
        if self._like is None:
            self.pruned.join()
        if not self._shared:
            process_group().all_reduce(self._outer, self._sum)

    def aim(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None] | None:
        """Return W D, and Ĥ and W D of the held-out samples where there are any.

        None where inputs were not paired, so that there is no other aim than W.
        """
        if not self.paired or (self.held_out is not None and not self.held_out.paired):
            return None
        other = self.held_out
        judge = None if other is None else (other.pruned.moment, other.residual(weight))
        return self.residual(weight), judge

    def residual(self, weight: Tensor) -> Tensor:
        """Return W D as (groups, rows, columns); with a bias, the constant-1 column is last."""
        n = max(self.pruned.count, 1)
        outer, total = self._outer.to(torch.float64) / n, self._sum / n
        if not self._weighed:
            # The constant 1 is the same in both networks, so its column is left out.
            w = weight.to(torch.float64)[..., : outer.shape[1]]
            outer, total = w @ outer, (w @ total.unsqueeze(-1)).squeeze(-1)
        return torch.cat([outer, total.unsqueeze(-1)], dim=-1) if self.pruned.bias else outer
