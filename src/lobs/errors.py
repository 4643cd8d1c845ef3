"""Errors and warnings. Each names the layer, the number and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


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


class NumericalWarning(UserWarning):
    """The result is valid, but a matrix was regularised; the message says which and by how much."""


_given: ContextVar[set[str] | None] = ContextVar("lobs_warnings_given", default=None)


@contextmanager
def warning_once() -> Iterator[None]:
    """Inside this block, give each warning with a `matter` only once."""
    token = _given.set(set())
    try:
        yield
    finally:
        _given.reset(token)


def caution(message: str, matter: str | None = None) -> None:
    """Give a `NumericalWarning` at the line where the user's code called `lobs`.

    Frames of torch or of the standard library may lie between two of ours, so frames are not
    counted but searched. Inside `warning_once` a warning with the same `matter` comes only once.
    """
    given = _given.get()
    if given is not None and matter is not None:
        if matter in given:
            return
        given.add(matter)
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
