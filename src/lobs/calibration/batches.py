"""Read the user's batches, and name the batch in every error.

Data come from user code. A loader may raise in the middle, and a network may fail on one batch.
Both become one error that names the batch and keeps the cause. Where another type or shape would
work, the message gives the code to write.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lobs.calibration.reading import Signature, as_arguments, warn_of_dropped
from lobs.errors import CalibrationError, LobsError

_CASTS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}
# Types that are easily given in place of the network's. Other integers may be labels.
_MISTAKEN = {"uint8", *(str(kind).removeprefix("torch.") for kind in _CASTS)}


class Batches:
    """Iterate over a user's batches, with errors that name the batch."""

    def __init__(self, source: Iterable[Any], name: str = "calibration") -> None:
        self.source, self.name = source, name
        self._first: int | None = None
        self._steady = True

    def __iter__(self) -> Iterator[Any]:
        sample = 0
        with user_code(f"reading the first {self.name} batch"):
            batches = iter(self.source)
        for index in count():
            with user_code(f"reading {self.name} batch {index}"):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            sample = _sampled(batch, sample)
            yield batch
        self._first = sample if self._first is None else self._first
        self._steady = self._steady and sample == self._first

    @property
    def steady(self) -> bool:
        """Return whether every complete pass has given the same batches, as far as sampled."""
        return self._steady

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class Every(Batches):
    """Every so many of some batches, from the first on."""

    def __init__(self, whole: Batches, every: int) -> None:
        super().__init__(whole.source, whole.name)
        self._whole, self._every = whole, every

    def __iter__(self) -> Iterator[Any]:
        return islice(self._whole, 0, None, self._every)

    @property
    def steady(self) -> bool:
        """See `Batches`."""
        return self._whole.steady

    def __len__(self) -> int:
        return (len(self._whole) + self._every - 1) // self._every


def _sampled(value: Any, before: int) -> int:
    """Return a checksum of the shapes and of a few hundred numbers of a batch."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        few = flat[:: max(1, len(flat) // 256)].cpu().contiguous()
        raw = few.view(torch.uint8).numpy().tobytes()
        return zlib.crc32(f"{tuple(value.shape)}".encode() + raw, before)
    if isinstance(value, Mapping):
        value = list(value.values())
    for item in value if isinstance(value, tuple | list) else ():
        before = _sampled(item, before)
    return zlib.crc32(b".", before)


def guarded(batches: Iterable[Any], *, again: bool = True, name: str = "batches") -> Batches:
    """Return the batches with errors that name the batch, or refuse what is no iterable of them.

    Args:
        batches: an iterable of batches.
        again: read a generator into memory, because the batches are needed more than once.
        name: the argument's name, for messages.
    """
    if isinstance(batches, Batches):
        return batches
    if isinstance(batches, Tensor | str | bytes | dict) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{name} is a {type(batches).__name__}: give a list of batches or a DataLoader; one "
            "tensor x is [x]."
        )
    if isinstance(batches, np.ndarray) and batches.dtype != object:  # not an array of tensors
        raise CalibrationError(
            f"{name} is a numpy array of {batches.dtype} of shape {batches.shape}: write "
            f"[{written(batches, torch.float32)}], a list of batches, in the network's type."
        )
    source = Batches(batches, "calibration" if name == "batches" else name)
    return Batches(list(source)) if again and isinstance(batches, Iterator) else source


@contextmanager
def user_code(what: str, remedy: Callable[[], str] = str) -> Iterator[None]:
    """Turn an exception of user code into a `CalibrationError` that names the action.

    `remedy` is called to find a sentence of advice, which may be empty.
    """
    try:
        yield
    except CalibrationError as error:
        if not (advice := remedy()):
            raise
        raise CalibrationError(f"{error} {advice}") from error
    except LobsError:
        raise
    except Exception as error:
        text = f"{what} raised {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        advice = remedy()
        raise CalibrationError(f"{text.rstrip('.')}. {advice}" if advice else text) from error


def remedy_for(
    run: Callable[[Any], Any], batch: Tensor | Mapping[str, Any], kind: torch.dtype | None
) -> str:
    """Return a sentence with the code that makes a failing batch run, after trying it.

    Args:
        run: runs the network on a batch.
        batch: the batch that failed.
        kind: the type of the network's weights.
    """
    if _runs(run, batch):  # a failure that does not repeat has another cause than the batch
        return ""
    if isinstance(batch, Mapping):
        return _remedy_by_name(run, batch, kind)
    code, x = written(batch, kind), _typed(batch, kind)
    if code != "x" and _runs(run, x):
        return f"It runs with {code}: the batch is {batch.dtype}, the network {kind}."
    for place, what in enumerate(("samples", "channels")):
        if place <= x.dim() and _runs(run, x.unsqueeze(place)):
            shape = tuple(batch.shape)
            return (
                f"It runs with {code}.unsqueeze({place}): does the batch, of shape {shape}, lack a "
                f"dimension of {what}?"
            )
    return ""


def written(value: Any, kind: torch.dtype | None, name: str = "x") -> str:
    """Return the code that converts a value to a tensor of the network's type.

    It is the name alone where nothing is to be done, or nothing can be done.

    Args:
        value: the value.
        kind: the type of the network's weights.
        name: the variable's name in the code.
    """
    if not isinstance(value, Tensor | np.ndarray) or (
        isinstance(value, np.ndarray) and value.dtype.kind not in "fiub"
    ):
        return name
    code = name if isinstance(value, Tensor) else f"torch.from_numpy({name})"
    return f"{code}.{_CASTS[kind]}()" if kind in _CASTS and _mistaken(value, kind) else code


def _remedy_by_name(
    run: Callable[[Any], Any], batch: Mapping[str, Any], kind: torch.dtype | None
) -> str:
    changes = {
        name: code for name, value in batch.items() if (code := written(value, kind, name)) != name
    }
    if not changes or not _runs(
        lambda names: run({**batch, **{n: _typed(batch[n], kind) for n in names}}), changes
    ):
        return ""
    had = ", ".join(f"'{name}' is {_described(batch[name])}" for name in changes)
    return f"It runs with {', '.join(changes.values())}: {had}, the network {kind}."


def _mistaken(value: Tensor | np.ndarray[Any, Any], kind: torch.dtype) -> bool:
    """Return whether a value has a type that is easily given in place of the network's."""
    name = str(value.dtype).removeprefix("torch.")
    return name in _MISTAKEN and f"torch.{name}" != str(kind)


def _typed(value: Any, kind: torch.dtype | None) -> Tensor:
    """Convert a value as `written` describes; arrays are copied, as they may be read-only."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensor.to(kind) if kind in _CASTS and _mistaken(tensor, kind) else tensor


def _described(value: Tensor | np.ndarray[Any, Any]) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else f"a numpy array of {value.dtype}"


def _runs(run: Callable[[Any], Any], batch: Any) -> bool:
    try:
        with torch.no_grad():
            run(batch)
    except Exception:  # user code may raise anything
        return False
    return True


def fitting(
    model: nn.Module,
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    *,
    again: bool = True,
    name: str = "batches",
) -> Batches:
    """Return batches in the form that the network takes; warn once of what is left out.

    Where the network does not run on the first entry of a list, it is tried on the list itself.

    Args:
        model: the network.
        batches: batches as `prune` takes them.
        run: runs the network on one batch.
        again: read a generator into memory, because the batches are needed more than once.
        name: the argument's name, for messages.
    """
    if isinstance(batches, _Fitting):
        return batches
    return _Fitting(guarded(batches, again=again, name=name), model, run)


class _Fitting(Batches):
    """Convert every batch as it is read; the first one decides how lists are read."""

    def __init__(self, source: Batches, model: nn.Module, run: Callable[[Any], Any]) -> None:
        super().__init__(source.source, source.name)
        self._inner, self._model, self._run = source, model, run
        self._whole: bool | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            yield self._converted(batch)

    @property
    def steady(self) -> bool:
        """See `Batches`."""
        return self._inner.steady

    def _converted(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        if self._whole is None:
            self._whole = self._read_whole(batch)
            warn_of_dropped(self._model, batch)
        if self._whole:
            return Signature(self._model).whole(batch)
        return as_arguments(self._model, batch)

    def _read_whole(self, batch: Any) -> bool:
        """Return whether a list of tensors is the network's first argument."""
        listed = type(batch) is list and batch and all(isinstance(x, Tensor) for x in batch)
        whole = Signature(self._model).whole(batch) if listed else None
        if whole is None or self._runs(as_arguments(self._model, batch)):
            return False
        return self._runs(whole)

    def _runs(self, batch: Any) -> bool:
        try:
            with torch.no_grad():
                self._run(batch)
        except Exception:  # user code may raise anything
            return False
        return True
