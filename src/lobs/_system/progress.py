"""Show progress on anything that takes over two seconds.

Work announces itself with `track(label, total)`, and calls the function it gets with the units just
done. Nothing is shown unless a caller has opened `shown()`, so solvers report progress without
carrying a display through every signature.

A terminal gets one line: the phase, a bar, and the time left. Without a terminal every phase that
lasts over two seconds is one line on standard error, and a long one adds a line every minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any

from lobs._system.run_log import listening, phase

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int], None]

PATIENCE = 2.0  # seconds before anything is shown
_TICK = 0.2  # seconds between two looks at the clock
_AGAIN = 60.0  # seconds between two lines of one step, without a terminal
COMPILING = "compiling kernels (first run only)"

# Phase → the word a user reads. Phases that are not listed are shown by their own name.
_WORDS = {
    "influence": "allocate",
    "error curves": "allocate",
    "curvature": "calibrate",
    "inputs": "prune",
    "blocks": "prune",
    "solve": "prune",
    "trials": "search",
}
# Phases that repeat the others inside them: they are counted, and what is inside is named too.
_REPEATING = ("trials", "sweep")
_RATE_KNOWN = 0.1  # share of a step that must be done before its rate predicts the rest


@dataclass
class _Piece:
    """A phase that is under way."""

    name: str
    detail: str
    began: float
    total: float | None = None
    done: float = 0.0

    @property
    def word(self) -> str:
        return _WORDS.get(self.name, self.name)

    def left(self, now: float) -> float | None:
        """Return the seconds left at the rate so far; None before that rate means much."""
        if not self.total or self.done < _RATE_KNOWN * self.total:
            return None
        return max(0.0, (now - self.began) * (self.total - self.done) / self.done)


@dataclass
class _Step:
    """Consecutive phases of one word: what a user calls a phase."""

    word: str
    began: float
    done: float = 0.0  # cost of the layers that are finished


@dataclass
class Display:
    """The state of a run, as far as a user wants to see it.

    Args:
        steps: the words of the steps to come, in order; empty where they are not known.
        layers: the cost of each layer, by name, in the order they are pruned.
    """

    steps: Sequence[str] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    opened: float = field(default_factory=time.monotonic)
    pieces: list[_Piece] = field(default_factory=list)
    step: _Step | None = None
    index: int = -1
    took: dict[str, float] = field(default_factory=dict)
    compiling: int = 0
    lock: Any = field(default_factory=RLock)

    def begin(self, name: str, detail: str) -> None:
        """Take note of a phase that begins."""
        with self.lock:
            piece = _Piece(name, detail, time.monotonic())
            inner = [p for p in self.pieces if p.name not in _REPEATING]
            self.pieces.append(piece)
            if not inner and name not in _REPEATING:
                self._enter(piece.word)

    def end(self) -> None:
        """Take note that the innermost phase has ended."""
        with self.lock:
            piece = self.pieces.pop()
            if piece.name == "solve" and self.step is not None:
                self.step.done += self.layers.get(piece.detail, 0.0)

    def plan(self, steps: Sequence[str], layers: Mapping[str, float]) -> None:
        """Take the steps and layers of a run that begins inside this display."""
        with self.lock:
            if steps or layers:
                self.steps, self.layers, self.index = steps, layers, -1
                self.took.clear()

    def expect(self, total: float | None) -> None:
        """Set the units of the innermost phase."""
        with self.lock:
            self.pieces[-1].total = total

    def advance(self, piece: _Piece, units: float) -> None:
        """Count units of a phase."""
        with self.lock:
            piece.done += units

    def _enter(self, word: str) -> None:
        """Begin a new step, unless the phase belongs to the one under way."""
        now = time.monotonic()
        if self.step is not None:
            if self.step.word == word:
                return
            self.took[self.step.word] = now - self.step.began
        self.step = _Step(word, now)
        later = [i for i in range(self.index + 1, len(self.steps)) if self.steps[i] == word]
        self.index = later[0] if later else self.index

    def words(self) -> str:
        """Return what is under way: 'prune layer 3/12 fc1'."""
        with self.lock:
            if self.compiling:
                return COMPILING
            parts = [
                f"{p.word} {int(p.done) + 1}/{int(p.total)}"
                for p in self.pieces
                if p.name in _REPEATING and p.total
            ]
            inner = [p for p in self.pieces if p.name not in _REPEATING]
            if inner:
                parts.append(self._described(inner))
            return ", ".join(parts) or (self.step.word if self.step is not None else "prepare")

    def _described(self, inner: Sequence[_Piece]) -> str:
        word, names = inner[0].word, list(self.layers)
        block = next((p.detail for p in inner if p.name == "blocks"), None)
        if block is not None:
            return f"refit block {block}"
        layer = next((p.detail for p in inner if p.detail in self.layers), None)
        if layer is None or word != "prune":
            return word
        return f"{word} layer {names.index(layer) + 1}/{len(names)} {layer}"

    def left(self) -> float | None:
        """Return about how many seconds are left of the whole run; None where that is unknown."""
        with self.lock:
            now = time.monotonic()
            for piece in self.pieces:
                if piece.name in _REPEATING:
                    return piece.left(now)
            here = self.left_of_step()
            if here is None or self.step is None:
                return None
            later = [word for word in self.steps[self.index + 1 :] if word != "measure"]
            whole = {**self.took, self.step.word: now - self.step.began + here}
            if any(word not in whole for word in later if word != "refit"):
                return None
            known = here + sum(whole.get(word, 0.0) for word in later)
            if "refit" in later:  # until it has begun: about as long as all steps before it
                known += now - self.opened + known
            return known

    def left_of_step(self) -> float | None:
        """Return about how many seconds are left of the step under way."""
        with self.lock:
            now, cost = time.monotonic(), sum(self.layers.values())
            if self.step is not None and self.step.word == "prune" and cost:
                if self.step.done < _RATE_KNOWN * cost:
                    return None
                spent = now - self.step.began
                return spent * max(0.0, cost - self.step.done) / self.step.done
            counted = [p for p in self.pieces if p.name not in _REPEATING and p.total]
            return counted[0].left(now) if counted else None


class _Watcher(Thread):
    """Look at a display several times a second and show it once it is due."""

    def __init__(self, display: Display) -> None:
        super().__init__(daemon=True, name="lobs progress")
        self.display, self.stopped = display, Event()
        self.bars: Progress | None = None
        self.terminal: bool | None = None
        self.share = 0.0
        self.wrote_about: tuple[float, bool] | None = None  # the last line's step, if compiling
        self.wrote = 0.0  # when the last line was written

    def run(self) -> None:
        """Watch until `close`."""
        while not self.stopped.wait(_TICK):
            if time.monotonic() - self.display.opened > PATIENCE:
                self._look()

    def close(self) -> None:
        """Stop watching and remove the line from the terminal."""
        self.stopped.set()
        self.join()
        if self.bars is not None:
            self.bars.stop()

    def _look(self) -> None:
        if self.terminal is None:
            from rich.console import Console

            self.terminal = Console(stderr=True).is_terminal
        if self.terminal:
            self._draw()
        else:
            self._announce()

    def _announce(self) -> None:
        """Write one line for a step that has lasted long enough."""
        step, now = self.display.step, time.monotonic()
        if step is None or now - step.began < PATIENCE:
            return
        about = (step.began, bool(self.display.compiling))
        if about == self.wrote_about and now - self.wrote < _AGAIN:
            return
        self.wrote_about, self.wrote = about, now
        passed = now - self.display.opened
        with suppress(OSError, ValueError):  # standard error may be closed by now
            sys.stderr.write(f"[{passed:5.0f} s] {self.display.words()}{self._time_left()}\n")
            sys.stderr.flush()

    def _draw(self) -> None:
        if self.bars is None:
            self.bars = _bars()
            self.bars.add_task("", total=None, passed="", left="")
            self.bars.start()
        left, passed = self.display.left(), time.monotonic() - self.display.opened
        if left is not None:  # a better estimate must not move the bar backwards
            self.share = max(self.share, passed / max(passed + left, 1e-9))
        self.bars.update(
            self.bars.task_ids[0],
            description=self.display.words(),
            total=1.0 if self.share else None,
            completed=self.share,
            passed=f"{int(passed) // 60}:{int(passed) % 60:02}",
            left=self._time_left().removeprefix(", "),
        )
        self.bars.refresh()

    def _time_left(self) -> str:
        left, where = self.display.left(), ""
        if left is None:
            left, where = self.display.left_of_step(), " in this step"
        return "" if left is None else f", about {_spelled(left)} left{where}"


def _spelled(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[passed]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a pipe must get what is printed
        auto_refresh=False,
    )


_display: ContextVar[Display | None] = ContextVar("lobs_progress", default=None)
_open: list[Display] = []  # kernels may be compiled in a thread that has no context of ours


@contextmanager
def shown(
    enabled: bool = True, *, steps: Sequence[str] = (), layers: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Show the progress of the work in this block on standard error.

    Args:
        enabled: False shows nothing.
        steps: the words of the steps to come, in order, for the time left.
        layers: the cost of each layer to prune, by name.
    """
    outer = _display.get()
    if outer is not None and enabled:
        outer.plan(steps, layers or {})
        yield
        return
    if not enabled:
        yield
        return
    display = Display(steps, layers or {})
    watcher = _Watcher(display)
    token = _display.set(display)
    _open.append(display)
    watcher.start()
    try:
        with listening(display):
            yield
    finally:
        watcher.close()
        _open.remove(display)
        _display.reset(token)


@contextmanager
def track(label: str, total: int | None) -> Iterator[Advance]:
    """Announce a piece of work; yield a function that takes the number of units just done."""
    with phase(label):
        display = _display.get()
        if display is None or not display.pieces:
            yield lambda _: None
            return
        display.expect(total)
        piece = display.pieces[-1]
        yield lambda units: display.advance(piece, units)


def compiling(under_way: bool) -> None:
    """Inform the display that a kernel is being compiled, or that it is done."""
    for display in _open:
        with display.lock:
            display.compiling = max(0, display.compiling + (1 if under_way else -1))
