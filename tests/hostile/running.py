"""Hold every hostile case to one rule: a right answer, or a `LobsError` in words, in time."""

from __future__ import annotations

import signal
import traceback
import warnings
from contextlib import contextmanager

from lobs import LobsError

SECONDS = 30  # of processor time, so that a busy machine does not count as a hang


class Hang(BaseException):
    pass


@contextmanager
def in_time():
    def late(*_):
        raise Hang

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def faults(case, seeds):
    """Run `case(seed)` for many seeds; return the faults by seed. A good case returns None."""
    found = {}
    for seed in seeds:
        try:
            with in_time(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrong = case(seed)
        except LobsError as error:
            wrong = (
                None
                if len(str(error)) > 15 and "\n" not in str(error).strip()
                else f"says only: {error}"
            )
        except Hang:
            wrong = "hangs"
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = [
                frame for frame in frames if "/lobs/" in frame.filename or frame is frames[-1]
            ][-1]
            where = f"{place.filename.split('/')[-1]}:{place.lineno}"
            wrong = f"{type(error).__name__}: {str(error)[:200]} ({where})"
        if wrong:
            found[seed] = wrong
    return found
