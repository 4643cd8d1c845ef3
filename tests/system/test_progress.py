"""Progress is one line in the user's words, with the time left, and only where it is worth one."""

from __future__ import annotations

import io
import logging
import re
import sys
import time

import pytest
import torch
from torch import nn

import lobs
from lobs._system import progress
from lobs._system.progress import Display, compiling, shown, track
from lobs._system.run_log import phase

LAYERS = {"fc1": 6.0, "fc2": 3.0, "fc3": 1.0}


@pytest.fixture
def display(monkeypatch):
    """A display whose clock the test turns by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Display(["calibrate", "allocate", "prune", "allocate", "prune"], LAYERS, opened=100.0)

    def turn(seconds):
        now[0] += seconds

    return shown, turn


def work(display, turn, name, seconds, detail=""):
    display.begin(name, detail)
    turn(seconds)
    display.end()


def test_a_layer_is_named_with_its_number(display):
    state, _ = display
    state.begin("inputs", "fc2")
    assert state.words() == "prune layer 2/3 fc2"
    state.end()
    state.begin("solve", "fc3")
    state.begin("rows", "")  # what a solver tracks inside
    assert state.words() == "prune layer 3/3 fc3"


@pytest.mark.parametrize(
    ("name", "word"),
    [("influence", "allocate"), ("error curves", "allocate"), ("calibrate", "calibrate")],
)
def test_phases_have_the_users_words(display, name, word):
    state, _ = display
    state.begin(name, "")
    assert state.words() == word


def test_repeated_work_is_counted(display):
    state, _ = display
    state.begin("sweep", "")
    state.expect(10)
    state.advance(state.pieces[0], 2)
    state.begin("solve", "fc1")
    assert state.words() == "sweep 3/10, prune layer 1/3 fc1"


def test_the_time_left_counts_layers_by_their_cost_and_rounds_to_come(display):
    state, turn = display
    work(state, turn, "calibrate", 5)
    work(state, turn, "influence", 2)
    state.begin("error curves", "")
    state.expect(4)
    state.advance(state.pieces[0], 1)
    turn(1)
    # Pruning has not begun: only the end of this step can be told.
    assert state.left() is None and state.left_of_step() == pytest.approx(3)
    turn(-1)
    state.end()
    work(state, turn, "solve", 12, "fc1")
    # 6 of 10 units took 12 s: 8 s are left here. Round 2 takes 2 s and 20 s.
    assert state.left() == pytest.approx(8 + 2 + 20)


def test_a_refit_to_come_counts_as_much_as_all_before_it(display):
    state, turn = display
    state.steps = ["prune", "refit"]
    work(state, turn, "solve", 12, "fc1")
    assert state.left() == pytest.approx(8 + (12 + 8))


def test_compiling_is_announced_while_it_lasts():
    with shown():
        state = progress._open[-1]
        with phase("calibrate"):
            compiling(True)
            compiling(True)  # a kernel that needs another one
            compiling(False)
            assert state.words() == "compiling kernels (first run only)"
            compiling(False)
            assert state.words() == "calibrate"


def test_numba_tells_the_display_when_it_compiles(monkeypatch):
    import numba

    from lobs.solvers.kernels import compiling as kernels

    told = []
    monkeypatch.setattr(kernels, "compiling", told.append)

    @numba.njit
    def double(x):
        return 2 * x

    double(3)
    assert told == [True, False]
    double(4)
    assert told == [True, False]  # compiled already


def lines(monkeypatch, patience, seconds):
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(progress, "_TICK", 0.02)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with shown(), track("calibrate", 4) as advance:
        for _ in range(4):
            advance(1)
            time.sleep(seconds / 4)
    return written.getvalue().splitlines()


def test_without_a_terminal_a_long_phase_is_one_line(monkeypatch):
    (line,) = lines(monkeypatch, 0.1, 0.5)
    assert re.fullmatch(r"\[ +\d+ s\] calibrate(, about \d+ s left)?", line)


def test_without_a_terminal_a_phase_that_goes_on_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "_AGAIN", 0.15)
    found = lines(monkeypatch, 0.05, 0.8)
    assert len(found) > 2 and all("calibrate" in line for line in found)


def test_compiling_is_a_line_of_its_own_and_the_phase_follows(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_TICK", 0.02)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with shown(), phase("calibrate"):
        for starts in (True, False):
            compiling(starts)
            time.sleep(0.25)
    first, second = written.getvalue().splitlines()
    assert "compiling kernels" in first and second.endswith("calibrate")


def test_without_a_terminal_a_short_phase_is_no_line(monkeypatch):
    assert lines(monkeypatch, 5, 0.1) == []


def test_nothing_is_shown_where_nobody_asked(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with shown(False), track("calibrate", 1) as advance:
        advance(1)
        time.sleep(0.1)
    assert written.getvalue() == ""


def test_the_logger_lobs_gets_the_phases_of_a_run(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with caplog.at_level(logging.DEBUG, logger="lobs"):
        lobs.prune(model, [torch.randn(50, 6)], keep=0.5, progress=False)
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert any(re.fullmatch(r"calibrate: \d+\.\d\d s", line) for line in found)
    assert any(line.startswith("solve 0: ") for line in found)
    assert any(r.getMessage().startswith("layer {") for r in caplog.records)


def test_a_failed_phase_is_logged_as_failed(caplog):
    with caplog.at_level(logging.INFO, logger="lobs"), pytest.raises(KeyError), phase("work"):
        raise KeyError
    assert caplog.records[-1].getMessage().endswith("(failed)")


def test_no_time_is_named_before_a_tenth_of_a_step_is_done():
    piece = progress._Piece("calibrate", "", began=0.0, total=100.0, done=9.0)
    assert piece.left(now=9.0) is None
    piece.done = 10.0
    assert piece.left(now=10.0) == pytest.approx(90.0)
