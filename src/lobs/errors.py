"""What can go wrong, in words that name the layer, the number and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


class LobsError(Exception):
    """Base of every error that `lobs` raises on purpose."""


class TargetError(LobsError, ValueError):
    """A target that cannot be met or does not fit the problem."""


class ProblemError(LobsError, ValueError):
    """A layer problem whose shapes, values or missing parts make it unsolvable."""


class CalibrationError(LobsError):
    """Calibration data that cannot be used: empty, non-finite, never reaching a layer."""


class UnsupportedLayerError(LobsError, TypeError):
    """A layer that `lobs` will not prune, with the reason why."""


class SolverError(LobsError, ValueError):
    """An unknown solver, or one whose needs the problem does not meet."""


class ProcessGroupError(LobsError):
    """Processes that share a job and have lost each other."""


class FileError(LobsError):
    """A file that is missing, damaged, or was not written by `lobs`."""


class MaskError(LobsError, ValueError):
    """Masks that do not fit the network they are meant for."""


class ExportError(LobsError):
    """A network that cannot be handed on in the form that was asked for."""


class DataError(LobsError):
    """A data set that is missing or whose files fail their hash check."""


class TrainingError(LobsError, ValueError):
    """A training run whose parts do not fit, or whose loss ran away."""


class NumericalWarning(UserWarning):
    """The result is valid, but something helped or hurt it, such as a regularised matrix."""


# What the notes about single layers add up to, by kind: what happened, and what to make of it.
_KINDS = {
    "regularised": ("needed regularisation", "Normal for image borders and units that never fire."),
    "few samples": (
        "had fewer samples than inputs",
        "Their errors say little about new data: use more calibration samples.",
    ),
}
_NAMED = 3  # layers that a summary names


@dataclass
class _Notes:
    """What was said in a block, and what is still to be said at its end."""

    matters: set[str] = field(default_factory=set)
    layers: dict[str, dict[str, str]] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line about all layers, or nothing."""
        parts = []
        for kind, (happened, advice) in _KINDS.items():
            found = self.layers.get(kind, {})
            if found:
                named = [f"{layer}: {detail}" for layer, detail in list(found.items())[:_NAMED]]
                more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
                count = "1 layer" if len(found) == 1 else f"{len(found)} layers"
                parts.append(f"{count} {happened} ({'; '.join(named + more)}). {advice}")
        return " ".join(parts)


_notes: ContextVar[_Notes | None] = ContextVar("notes", default=None)


@contextmanager
def saying_once() -> Iterator[None]:
    """Give each caution once in this block, and one summary of the layers' notes at its end."""
    notes = _Notes()
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)
    if text := notes.summary():
        caution(text)


def note_layer(kind: str, layer: str, detail: str, message: str) -> None:
    """Note that a layer's problem was regularised; a block of `saying_once` sums notes up.

    Args:
        kind: "regularised" or "few samples".
        layer: the layer's name.
        detail: a few words about it, for the summary.
        message: the whole sentence, given at once where nothing sums it up.
    """
    notes = _notes.get()
    if notes is None:
        caution(message)
    else:
        notes.layers.setdefault(kind, {}).setdefault(layer, detail)


def caution(message: str, matter: str | None = None) -> None:
    """Raise a `NumericalWarning` that points at the user's call of `lobs`, not into `lobs`.

    The frames cannot be counted: torch or the standard library may lie between two of ours. In a
    block of `saying_once` a `matter` is mentioned once.
    """
    notes = _notes.get()
    if notes is not None and matter is not None:
        if matter in notes.matters:
            return
        notes.matters.add(matter)
    place = frame = sys._getframe(1)
    while frame.f_back is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
        frame = frame.f_back
        place = frame if ours else place
    scope = place.f_globals
    registry = scope.setdefault("__warningregistry__", {})  # Python's list of warnings given here
    warnings.warn_explicit(
        message,
        NumericalWarning,
        place.f_code.co_filename,
        place.f_lineno,
        str(scope.get("__name__")),
        registry,
    )
