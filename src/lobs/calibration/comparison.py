"""Compare two networks on the same data: distances of their outputs and their layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from lobs.layers.discovery import is_plain_layer
from lobs.solvers import linalg

ROUNDING = 1e-6  # of float32 outputs, relative to their norm


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


class PerSample:
    """Hold margins and deviations of samples, in the order in which they were read.

    A margin is the distance between the two largest numbers of a dense output row. Nothing is
    recorded of networks whose output is not one row of several numbers for each sample.

    Attributes:
        known: whether every batch had such an output.
        lost: layers whose outputs have no row for each sample, or that run more than once.
    """

    def __init__(self) -> None:
        self.known = True
        self.lost: set[str] = set()
        self._margins: list[Tensor] = []
        self._moved: dict[str, list[Tensor]] = {}
        self._pending: dict[str, Tensor] = {}

    def sizes(self, name: str, z: Tensor) -> Tensor | None:
        """Return ‖z‖ of every sample of a layer's output; None where nothing is recorded of it."""
        if not self.known or name in self.lost:
            return None
        if name in self._pending or z.dim() < 2:
            self.lost.add(name)
            return None
        return linalg.squares(z.detach().flatten(1)).sqrt()

    def add_layer(self, name: str, size: Tensor | None, moved: Tensor) -> None:
        """Add one call of a layer, before `end` is called for its batch.

        Args:
            name: the layer's name.
            size: what `sizes` gave for its dense output.
            moved: how far the output moved, of the same shape.
        """
        if size is not None:
            moved_by = linalg.squares(moved.detach().flatten(1)).sqrt()
            self._pending[name] = moved_by + ROUNDING * size

    def end(self, dense: Tensor | None, count: int) -> None:
        """End a batch.

        Args:
            dense: the dense network's output; None where it is no tensor.
            count: samples of the batch.
        """
        rows = dense is not None and dense.dim() == 2 and dense.shape[1] > 1
        if not rows or dense is None or len(dense) != count:
            self.known = False
        if self.known and dense is not None:
            first, second = dense.detach().to(torch.float64).topk(2, dim=1).values.unbind(1)
            rounding = ROUNDING * linalg.squares(dense.detach()).sqrt()
            self._margins.append((first - second - rounding.to(first)).cpu())
            self.lost |= {n for n, values in self._pending.items() if len(values) != count}
            for name, values in self._pending.items():
                self._moved.setdefault(name, []).append(values.cpu())
        self._pending.clear()

    def certified(self, gains: Mapping[str, float]) -> tuple[int, int] | None:
        """Return how many samples keep their answer whatever happens behind the layers, and of all.

        The difference of two numbers changes by at most √2 times the row's change. The top answer
        therefore stays where the margin is larger than that. None where a layer is not known.

        Args:
            gains: factors from each layer's deviation to the output.
        """
        margins = self._joined(self._margins)
        if not self.known:
            return None
        if margins is None:  # this process read no samples
            return 0, 0
        bound = torch.zeros_like(margins)
        for name, gain in gains.items():
            moved = self._joined(self._moved.get(name, []))
            if name in self.lost or moved is None or len(moved) != len(margins):
                return None
            bound += gain * moved
        return int((margins > 2**0.5 * bound).sum()), len(margins)

    @staticmethod
    def _joined(parts: list[Tensor]) -> Tensor | None:
        return torch.cat(parts) if parts else None


def applied(layer: Layer, x: Tensor) -> Tensor | None:
    """Return a plain layer's output for an input, without its hooks; None for other layers."""
    module: nn.Module = layer.module
    if not is_plain_layer(module) or isinstance(module, nn.MultiheadAttention):
        return None
    out = type(module).forward(module, x)
    return out if isinstance(out, Tensor) else None


class Comparison:
    """The distance between a dense and a pruned network, summed over batches.

    Call `add` with every batch, then `join` once. The results are there after `join`.

    Args:
        dense: the network as it was given.
        pruned: the network to compare with it.
        layers: pairs of a dense layer and its pruned one whose outputs are compared too.
        expected: number of samples that the data must hold. With another number `output` is None,
            because an iterable that can be read only once has nothing left to compare.
        same_inputs: pairs of layers whose outputs are compared, sample by sample, for one input.
            They get the inputs of the first layer of each pair, in its own network.
    """

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        layers: Sequence[tuple[Layer, Layer]] = (),
        expected: int | None = None,
        same_inputs: Sequence[tuple[Layer, Layer]] = (),
    ) -> None:
        self.dense, self.pruned, self.pairs, self.expected = dense, pruned, layers, expected
        self.same_inputs, self.per_sample = same_inputs, PerSample()
        self.samples = 0
        self.steady = True  # the batches were those of earlier passes
        self.output: float | None = None  # root mean square over the samples
        self.output_norm: float | None = None  # of the dense output, root mean square
        self.layers: dict[str, LayerDistance] = {}
        self._total, self._energy, self._comparable = 0.0, 0.0, True
        self._sums = {before.name: [0.0, 0.0, 0] for before, _ in layers}
        self._outputs: dict[str, list[Tensor]] = {}

    def add(self, batch: Any) -> tuple[Any, Any]:
        """Run both networks on a batch, add their distance, and return what they answer."""
        self._outputs.clear()
        with padded(masks_of(batch)), self._on_same_inputs():
            before = _run(self.dense, batch, [(before, self._note) for before, _ in self.pairs])
            after = _run(self.pruned, batch, [(after, self._compare) for _, after in self.pairs])
            first, second = (_data_of(answer) for answer in (before, after))
        for name, left in self._outputs.items():
            self._sums[name][2] += math.inf if left else 0
        self.add_outputs(first, second, batch_size(batch))
        return before, after

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
        self.per_sample.end(first, count)

    def like(self, names: Collection[str]) -> Comparison:
        """Return an empty comparison of the same networks, with those pairs that are named."""
        pairs, same = (
            [pair for pair in found if pair[0].name in names]
            for found in (self.pairs, self.same_inputs)
        )
        return Comparison(self.dense, self.pruned, pairs, same_inputs=same)

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
        size = self.per_sample.sizes(name, z)
        moved = z.to(kind).sub_(z_hat.detach().to(kind))
        sums[0] += linalg.energy(moved)
        sums[2] += z.numel()
        self.per_sample.add_layer(name, size, moved)

    def _on_same_inputs(self) -> AbstractContextManager[None]:
        return watching(
            first.on_input(partial(self._on_same_input, first, second))
            for first, second in (self.same_inputs if self.per_sample.known else ())
        )

    def _on_same_input(self, first: Layer, second: Layer, x: Tensor) -> None:
        z, other = applied(first, x), applied(second, x)
        if z is None or other is None:
            self.per_sample.lost.add(first.name)
        else:
            size = self.per_sample.sizes(first.name, z)
            self.per_sample.add_layer(first.name, size, z - other)


def between(
    dense: nn.Module,
    pruned: nn.Module,
    layers: Sequence[tuple[Layer, Layer]],
    inputs: str,
    expected: int | None = None,
) -> Comparison:
    """Return an empty comparison whose layers get the inputs on which they were pruned.

    Args:
        dense: the network as it was given.
        pruned: the other network.
        layers: pairs of a dense layer and its pruned one.
        inputs: "dense", "pruned" or "asymmetric"; each layer's own outputs are compared then.
        expected: number of samples that the data must hold.
    """
    if inputs == "asymmetric":
        return Comparison(dense, pruned, layers, expected)
    same = [(second, first) for first, second in layers] if inputs == "pruned" else layers
    return Comparison(dense, pruned, (), expected, same)


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
) -> Any:
    with watching(layer.on_output(partial(callback, layer.name)) for layer, callback in watched):
        return call(model, batch)


def _data_of(answer: Any) -> Tensor | None:
    """Return an answer's output without padded positions."""
    out = main_output(answer)
    return None if out is None else without_padding(out)
