"""Define `Block`: a stretch of the network that is calibrated, solved and refitted as one.

Its layers are pruned in running order, each on the outputs of the pruned layers before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.forward import unpadded
from lobs.calibration.moments import PairedMoments
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching

KEPT_BACK = 8  # one sample in so many is held out
IN_MEMORY = 4 * 2**30  # bytes of activations that may stay in memory
_WORTH_A_FILE = 2**16
ENOUGH = 32  # input vectors for every column of a layer; of images with more, some positions serve

LayerPair = tuple[Layer, Layer]
Run = Callable[[], Any]
Inputs = dict[str, list[Tensor]]  # by layer, one for each call


class StopRun(BaseException):  # not an Exception: user code that catches those must not keep it
    """End a run early, because everything wanted has been seen."""


class Block(ABC):
    """Run a stretch of the network, which holds layers, in the dense and the pruned network.

    Args:
        layers: pairs of one layer in the dense and the pruned network.
        name: what the progress display and the run store call the block.
    """

    def __init__(self, layers: Sequence[LayerPair], name: str) -> None:
        self.layers, self.name = layers, name
        self.calls: dict[str, int] = {}  # calls of each layer in one pass, where not one

    vectors: Mapping[str, int] = {}  # of each layer's inputs in all data, where positions may go
    holds_out = False  # whether some samples are kept out of the layers' moments
    count = 0  # batches of this process, where samples are held out

    @abstractmethod
    def both(self) -> Iterator[tuple[Run, Run]]:
        """Yield for every batch a function that runs the dense block and one for the pruned."""

    def inputs(
        self, layers: Sequence[LayerPair], *, held_out: bool = False
    ) -> Iterator[tuple[Inputs, Inputs]]:
        """Yield for every batch the inputs of some layers, in the dense and the pruned network.

        Args:
            layers: the layers.
            held_out: take the held-out samples instead.
        """
        if held_out and not self.holds_out:
            return
        counts = process_group().all_gather(self.count)
        total, first = sum(counts), sum(counts[: process_group().rank])
        whole = not self.holds_out or total >= KEPT_BACK
        for number, (dense, pruned) in enumerate(self.both(), start=first):
            if self.holds_out and whole and held_out_whole(number, total) is not held_out:
                continue
            part = None if whole else held_out
            yield (
                inputs_of([a for a, _ in layers], self.calls, dense, part),
                inputs_of([b for _, b in layers], self.calls, pruned, part),
            )

    def advance(self) -> None:  # noqa: B027 - a block that keeps no state has nothing to do
        """Leave this block behind, now that its layers are pruned."""

    def run_dense(self, seen: Collection[str]) -> None:
        """Run batches through the dense block until all its layers were `seen`: mostly one."""
        ran = False
        for dense, _ in self.both():
            dense()
            ran = True
            if len(seen) == len(self.layers):
                return
        if process_group().size == 1 and not ran:
            raise CalibrationError("batches could be read only once: give a list or a DataLoader.")

    def observe(
        self,
        together: Sequence[LayerPair],
        moments: Mapping[str, PairedMoments],
        *,
        held_out: bool = False,
    ) -> Iterator[None]:
        """Add the inputs of these layers to their moments, batch by batch.

        Args:
            together: layers that one run serves.
            moments: their moments, by name.
            held_out: take the held-out samples instead.
        """
        inputs = self.inputs(together, held_out=held_out)
        for number, (dense_inputs, pruned_inputs) in enumerate(inputs):
            for before, after in together:
                xs, xs_hat = dense_inputs[before.name], pruned_inputs[after.name]
                if len(xs) != len(xs_hat):  # an expert that no token reaches any more
                    moments[before.name].unpaired(after, xs_hat)
                    continue
                step = before.spacing(self.vectors.get(before.name, 0), ENOUGH * before.columns)
                for x, x_hat in zip(xs, xs_hat, strict=True):
                    moments[before.name].add(before, x, x_hat, step=step, start=number)
                if not moments[before.name].pruned.finite:
                    raise CalibrationError(
                        f"layer '{before.name}': NaN or infinite input. Check the data, and the "
                        "network on each batch."
                    )
            yield


def held_out_whole(number: int, total: int) -> bool:
    """Return whether an uncut batch is held out: every eighth, or the last of fewer.

    Args:
        number: the batch's number.
        total: number of batches, in all processes.
    """
    every = KEPT_BACK if total >= KEPT_BACK else max(2, total)
    return number % every == every - 1


def _part(x: Tensor, held_out: bool | None) -> slice | None:
    """Return the last eighth of an input's rows, or the others; None stands for all."""
    edge = len(x) - len(x) // KEPT_BACK
    return None if held_out is None else slice(edge, None) if held_out else slice(edge)


def inputs_of(
    layers: Sequence[Layer], calls: Mapping[str, int], run: Run, held_out: bool | None = None
) -> Inputs:
    """Return the inputs of each layer in one run; the run stops after the last expected call.

    Args:
        layers: the layers.
        calls: how often each runs, where not once.
        run: runs the network, or the part that holds the layers.
        held_out: take the last eighth of every input's rows, or the others; by default all.
    """
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def note(layer: Layer) -> Callable[[Tensor], None]:
        def callback(x: Tensor) -> None:
            found[layer.name].append(unpadded(layer, x.detach(), _part(x, held_out)))
            if all(len(found[n]) >= calls.get(n, 1) for n in found):
                raise StopRun

        return callback

    with watching(layer.on_input(note(layer)) for layer in layers), suppress(StopRun):
        run()
    return found


def layers_of(
    block: Block, known: Collection[str] = ()
) -> Iterator[tuple[Layer, PairedMoments | None]]:
    """Yield a block's layers of the pruned network in running order, with their input moments.

    Layers with the same input share a run. The caller writes each layer before it asks for the
    next.

    Args:
        block: the block.
        known: names of layers whose solution exists already; they come without moments.
    """
    groups = _sharing_inputs(block)
    if memory.limit() is not None:
        # One run per layer costs time; the moments of several layers at once cost memory.
        groups = [[pair] for group in groups for pair in group]
    for together in groups:
        wanted = [pair for pair in together if pair[0].name not in known]
        moments = _moments(wanted)
        judges = _moments(wanted) if block.holds_out else {}
        with (
            process_group().raise_together(),
            track(f"inputs of {together[0][0].name}", None) as advance,
        ):
            for _ in block.observe(wanted, moments) if wanted else ():
                advance(1)
            for _ in block.observe(wanted, judges, held_out=True) if judges else ():
                pass
        for moment in (*moments.values(), *judges.values()):
            moment.join()
        for name, judge in judges.items():
            moments[name].held_out = judge if judge.pruned.count else None
        for before, after in together:
            yield after, moments.get(before.name)


def _moments(layers: Sequence[LayerPair]) -> dict[str, PairedMoments]:
    """Return empty moments for layers with one input; equal sums are shared."""
    found: dict[str, PairedMoments] = {}
    first: dict[Any, PairedMoments] = {}
    for layer, _ in layers:
        key = (layer.form, layer.columns, layer.groups, layer.bias is None, layer.weight.device,
               layer.name if layer.together is not None else "")  # fmt: skip
        found[layer.name] = PairedMoments(layer, first.get(key))
        if not memory.single_copy(layer.groups, layer.columns):  # whose problem overwrites it
            first.setdefault(key, found[layer.name])
    return found


def _sharing_inputs(block: Block) -> list[list[LayerPair]]:
    """Group the layers that one run can serve: neighbours whose input is the same tensor object."""
    seen: dict[str, list[tuple[Tensor, int]]] = {}

    def note(name: str, x: Tensor) -> None:
        # The tensors themselves are kept: the id of a freed tensor may be used again. A step may
        # work in place between two layers, which the version tells.
        seen.setdefault(name, []).append((x, version(x)))

    with (
        process_group().raise_together(),
        watching(before.on_input(partial(note, before.name)) for before, _ in block.layers),
    ):
        block.run_dense(seen)
    block.calls = {name: len(inputs) for name, inputs in seen.items()}
    pairs = {before.name: (before, after) for before, after in block.layers}
    groups: list[list[str]] = []
    joined: dict[Any, list[str]] = {}  # experts, which do not feed each other
    for name in seen:
        together = pairs[name][0].together
        same = groups and _identical(seen[groups[-1][-1]], seen[name])
        if together in joined:
            joined[together].append(name)
        elif same and together is None:
            groups[-1].append(name)
        else:
            groups.append([name])
            joined |= {} if together is None else {together: groups[-1]}
    # A process without data has seen no layer, yet all processes must take them in one order.
    gathered = process_group().all_gather([groups, block.calls])
    groups, block.calls = next((found for found in gathered if found[0]), ([], {}))
    return [[pairs[name] for name in group] for group in groups]


def _identical(some: Sequence[tuple[Tensor, int]], others: Sequence[tuple[Tensor, int]]) -> bool:
    return len(some) == len(others) and all(
        a is b and m == n for (a, m), (b, n) in zip(some, others, strict=True)
    )


def version(x: Tensor) -> int:
    """Return a number that grows when a tensor is written; 0 where torch does not count."""
    return 0 if x.is_inference() else x._version


def allowed_in_memory() -> int:
    """Return how many bytes of activations may stay in memory now."""
    left = memory.room()
    return IN_MEMORY if left is None else min(IN_MEMORY, left // 4)


def spilled(value: Any, shelf: memory.Shelf) -> Any:
    """Move a large CPU tensor to a file; return anything else as it is."""
    worth = (
        isinstance(value, Tensor) and value.device.type == "cpu" and size(value) >= _WORTH_A_FILE
    )
    return shelf.put(value) if worth else value


def loaded(value: Any) -> Any:
    """Return a value that may lie in a file."""
    return value.load() if isinstance(value, memory.Shelved) else value


def size(value: Any) -> int:
    """Return the bytes that a value holds in memory."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
