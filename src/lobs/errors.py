"""Errors and warnings. Each names the layer, the number and the remedy."""

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
    """A layer that `lobs` does not prune, with the reason."""


class BlocksError(CalibrationError, UnsupportedLayerError):
    """A network whose blocks cannot run one by one, from a folder; in memory it can be pruned."""


class SolverError(LobsError, ValueError):
    """An unknown solver, or one whose needs the problem does not meet."""


class ProcessGroupError(LobsError):
    """A process group that lost a process."""


class FileError(LobsError):
    """A file that is missing, damaged, or was not written by `lobs`."""


class MaskError(LobsError, ValueError):
    """Masks that do not fit the network they are meant for."""


class ExportError(LobsError):
    """A network that cannot be exported in the format that was asked for."""


class DataError(LobsError):
    """A data set that is missing or whose files fail their hash check."""


class TrainingError(LobsError, ValueError):
    """A training run whose arguments do not fit, or whose loss diverged."""


def clipped(value: object) -> str:
    """Return a value's repr in at most 60 characters; a huge number has no repr at all."""
    try:
        text = repr(value)
    except ValueError:
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"


def printable(text: str) -> str:
    r"""Return text in which everything that could steer a terminal, newlines too, is escaped.

    >>> printable("a\x1b[2K\nok")
    'a\\x1b[2K\\nok'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class NumericalWarning(UserWarning):
    """The result is valid, but a matrix was regularised; the message says which and by how much."""


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
    """Warnings that a block has given, and notes that it sums up at its end."""

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


_notes: ContextVar[_Notes | None] = ContextVar("lobs_notes", default=None)


@contextmanager
def warning_once() -> Iterator[None]:
    """Inside this block, give each warning with a `matter` only once.

    Notes about layers are summed up in one warning at its end, unless it fails. A block inside
    another one leaves that to the outer block.
    """
    if _notes.get() is not None:
        yield
        return
    notes = _Notes()
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)
    if text := notes.summary():
        caution(text)


def note_layer(kind: str, layer: str, detail: str, message: str) -> None:
    """Note that a layer's problem was regularised; a block of `warning_once` sums notes up.

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
    """Give a `NumericalWarning` at the line where the user's code called `lobs`.

    Frames of torch or of the standard library may lie between two of ours, so frames are not
    counted but searched. Inside `warning_once` a warning with the same `matter` comes only once.
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
    registry = scope.setdefault("__warningregistry__", {})  # Python's record of warnings given
    warnings.warn_explicit(
        message,
        NumericalWarning,
        place.f_code.co_filename,
        place.f_lineno,
        str(scope.get("__name__")),
        registry,
    )
