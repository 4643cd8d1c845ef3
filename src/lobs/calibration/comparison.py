"""Compare two networks on the same data: distances of their outputs and their layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.forward import (
    batch_size,
    call,
    evaluating,
    length,
    main_output,
    masks_of,
    padded,
    without_padding,
)
from lobs.layers import Layer, watching
from lobs.solvers import linalg


@dataclass(frozen=True)
class LayerDistance:
    """Σ‖ẑ − z‖² and Σ‖z‖² over a layer's output vectors z, and the number of these vectors."""

    error: float
    energy: float
    count: int

    @property
    def mean_error(self) -> float:
        """Return the mean of ‖ẑ − z‖²."""
        return self.error / max(1, self.count)

    @property
    def mean_energy(self) -> float:
        """Return the mean of ‖z‖²."""
        return self.energy / max(1, self.count)

    @property
    def relative(self) -> float:
        """Return the distance relative to the dense outputs' norm."""
        if not self.energy:
            return math.inf if self.error else 0.0
        return math.sqrt(self.error / self.energy)


class Comparison:
    """The distance between a dense and a pruned network, summed over batches.

    Call `add` with every batch, then `join` once. The results are there after `join`.

    Args:
        dense: the network as it was given.
        pruned: the network to compare with it.
        layers: pairs of a dense layer and its pruned one whose outputs are compared too.
        expected: number of samples that the data must hold. With another number `output` is None,
            because an iterable that can be read only once has nothing left to compare.
    """

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        layers: Sequence[tuple[Layer, Layer]] = (),
        expected: int | None = None,
    ) -> None:
        self.dense, self.pruned, self.pairs, self.expected = dense, pruned, layers, expected
        self.samples = 0
        self.steady = True  # the batches were those of earlier passes
        self.output: float | None = None  # root mean square over the samples
        self.output_norm: float | None = None  # of the dense output, root mean square
        self.layers: dict[str, LayerDistance] = {}
        self._total, self._energy, self._comparable = 0.0, 0.0, True
        self._sums = {before.name: [0.0, 0.0, 0] for before, _ in layers}
        self._outputs: dict[str, list[Tensor]] = {}

    def add(self, batch: Any) -> None:
        """Run both networks on a batch and add their distance."""
        self._outputs.clear()
        with padded(masks_of(batch)):
            first = _run(self.dense, batch, [(before, self._note) for before, _ in self.pairs])
            second = _run(self.pruned, batch, [(after, self._compare) for _, after in self.pairs])
        for name, left in self._outputs.items():
            self._sums[name][2] += math.inf if left else 0
        self.add_outputs(first, second, batch_size(batch))

    def add_outputs(self, first: Tensor | None, second: Tensor | None, count: int) -> None:
        """Add the distance of two outputs.

        Args:
            first: the dense network's output on a batch; None where there is no tensor.
            second: the pruned network's.
            count: samples of the batch.
        """
        if first is None or second is None:
            self._comparable = False
        else:
            self._total += linalg.squared_distance(first, second)
            self._energy += linalg.energy(first)
        self.samples += count

    def over(self, batches: Iterable[Any]) -> Comparison:
        """Add all batches and compute the results."""
        with side_by_side(self.dense, self.pruned, batches) as passing:
            for batch in passing:
                self.add(batch)
        self.steady = getattr(batches, "steady", True)
        return self.join()

    def join(self) -> Comparison:
        """Add up the sums of all processes and compute the results."""
        sums = [x for parts in self._sums.values() for x in parts]
        total, energy, incomparable, samples, *rest = process_group().sum_numbers(
            self._total, self._energy, not self._comparable, self.samples, *sums
        )
        self.samples = round(samples)
        known = incomparable == 0 and self.samples > 0
        if known and self.expected in (None, self.samples):
            self.output = math.sqrt(total / self.samples)
            self.output_norm = math.sqrt(energy / self.samples)
        for index, (layer, _) in enumerate(self.pairs):
            error, energy, numbers = rest[3 * index : 3 * index + 3]
            if math.isfinite(numbers):
                count = round(numbers) // max(1, layer.groups * layer.rows)
                self.layers[layer.name] = LayerDistance(error, energy, count)
        return self

    def _note(self, name: str, z: Tensor) -> None:
        # A copy: the next step may overwrite the layer's output in place.
        self._outputs.setdefault(name, []).append(without_padding(z.detach()).clone())

    def _compare(self, name: str, z_hat: Tensor) -> None:
        z_hat = without_padding(z_hat)
        stored, sums = self._outputs.get(name), self._sums[name]
        z = stored.pop(0) if stored else None
        if z is None or z.shape != z_hat.shape:  # other samples reached it: nothing to compare
            sums[2] = math.inf
            return
        kind = torch.promote_types(z.dtype, torch.float32)
        sums[1] += linalg.energy(z)
        sums[0] += linalg.energy(z.to(kind).sub_(z_hat.detach().to(kind)))
        sums[2] += z.numel()


@contextmanager
def side_by_side(
    dense: nn.Module, pruned: nn.Module, batches: Iterable[Any], label: str = "measure"
) -> Iterator[Iterator[Any]]:
    """Yield an iterator over the batches, with both networks in eval mode and progress shown.

    Args:
        dense: the network as it was given.
        pruned: the other network.
        batches: the data.
        label: what the progress bar says.
    """
    with (
        process_group().raise_together(),
        evaluating(dense),
        evaluating(pruned),
        track(label, length(batches)) as advance,
    ):

        def read() -> Iterator[Any]:
            for batch in batches:
                yield batch
                advance(1)

        yield read()


def compare(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[tuple[Layer, Layer]] = (),
    expected: int | None = None,
) -> Comparison:
    """Run two networks on the same data and return their distances.

    Args:
        dense: the network as it was given.
        pruned: the other network.
        batches: the data.
        layers: pairs of a dense layer and its pruned one whose outputs are compared too.
        expected: number of samples that the data must hold.
    """
    return Comparison(dense, pruned, layers, expected).over(batches)


def _run(
    model: nn.Module, batch: Any, watched: Sequence[tuple[Layer, Callable[[str, Tensor], None]]]
) -> Tensor | None:
    with watching(layer.on_output(partial(callback, layer.name)) for layer, callback in watched):
        out = main_output(call(model, batch))
        return None if out is None else without_padding(out)
