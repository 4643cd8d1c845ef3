"""Define `Block`: a stretch of the network that is calibrated, solved and refitted as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs.calibration.moments import PairedMoments
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching

IN_MEMORY = 4 * 2**30  # bytes of activations that may stay in memory
_WORTH_A_FILE = 2**16

LayerPair = tuple[Layer, Layer]
Run = Callable[[], Any]


class StopRun(BaseException):  # not an Exception: user code that catches those must not keep it
    """End a run early, because everything wanted has been seen."""


class Block(ABC):
    """Run a stretch of the network, which holds layers, in the dense and the pruned network.

    Args:
        layers: pairs of one layer in the dense and the pruned network.
        name: what the progress display and the journal call the block.
    """

    def __init__(self, layers: Sequence[LayerPair], name: str) -> None:
        self.layers, self.name = layers, name
        self.calls: dict[str, int] = {}  # calls of each layer in one pass, where not one

    holds_out = False  # whether some samples are kept out of the layers' moments

    @abstractmethod
    def both(self, *, held_out: bool = False) -> Iterator[tuple[Run, Run]]:
        """Yield for every batch a function that runs the dense block and one for the pruned.

        Args:
            held_out: yield the held-out samples instead.
        """

    def advance(self) -> None:  # noqa: B027 - a block that keeps no state has nothing to do
        """Leave this block behind, now that its layers are pruned."""

    def run_dense_once(self) -> None:
        """Run one batch through the dense block."""
        for dense, _ in self.both():
            dense()
            return
        if process_group().size == 1:
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
        for dense, pruned in self.both(held_out=held_out):
            dense_inputs = _inputs([a for a, _ in together], self.calls, dense)
            pruned_inputs = _inputs([b for _, b in together], self.calls, pruned)
            for before, after in together:
                xs, xs_hat = dense_inputs[before.name], pruned_inputs[after.name]
                if len(xs) != len(xs_hat):
                    raise CalibrationError(
                        f"layer '{before.name}' runs {len(xs)} times on a batch in the dense "
                        f"network and {len(xs_hat)} times once layers before it are pruned, so "
                        "their inputs cannot be compared. Use inputs='dense'."
                    )
                for x, x_hat in zip(xs, xs_hat, strict=True):
                    moments[before.name].add(before, x, x_hat)
            yield


def _inputs(layers: Sequence[Layer], calls: Mapping[str, int], run: Run) -> dict[str, list[Tensor]]:
    """Return the inputs of each layer in one run; the run stops after the last expected call."""
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def note(name: str) -> Callable[[Tensor], None]:
        def callback(x: Tensor) -> None:
            found[name].append(x.detach())
            if all(len(found[n]) >= calls.get(n, 1) for n in found):
                raise StopRun

        return callback

    with watching(layer.on_input(note(layer.name)) for layer in layers), suppress(StopRun):
        run()
    return found


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
