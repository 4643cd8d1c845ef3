"""What can go wrong, in words that name the layer, the number and the remedy."""

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
    """The answer stands, but a number had to be helped: it says which and by how much."""


_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


@contextmanager
def saying_once() -> Iterator[None]:
    """For the length of a block, cautions about the same matter come once, however their numbers change from pass to pass."""
    token = _said.set(set())
    try:
        yield
    finally:
        _said.reset(token)


def caution(message: str, matter: str | None = None) -> None:
    """Give a `NumericalWarning` the place where the user's code called `lobs`; a line of ours would say nothing to them.

    Counted frames would not find it: between two of ours there may be frames of torch's or of the
    standard library's. What is said of a `matter` is said once where `saying_once`.
    """
    said = _said.get()
    if said is not None and matter is not None:
        if matter in said:
            return
        said.add(matter)
    place = frame = sys._getframe(1)
    while frame.f_back is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
        frame = frame.f_back
        place = frame if ours else place
    scope = place.f_globals
    registry = scope.setdefault(
        "__warningregistry__", {}
    )  # where Python keeps what has been said here
    warnings.warn_explicit(
        message,
        NumericalWarning,
        place.f_code.co_filename,
        place.f_lineno,
        str(scope.get("__name__")),
        registry,
    )
