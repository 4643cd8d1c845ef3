"""A process killed at any moment ends the others in one line each, and the same command again ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from tests.crews import Commands, content

TIME_OUT = 10
NAMED = ("has lost another", "could not find the others")


@pytest.fixture(scope="module")
def crews(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("crews"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(crews):
    """What an uninterrupted run of three gives, and how long it takes once everything is compiled."""
    crews.prune(out="warm")
    codes, seconds = crews.prune(out="whole", resume="uninterrupted")
    assert codes == [0, 0, 0]
    return content(crews.folder / "whole"), seconds


def lose_one(crews, whole, rng, turn):
    """Kill one of three at a random moment and run again. False where the others had no more need of it."""
    truth, seconds = whole
    victim, after = rng.randrange(3), rng.random() * seconds
    out, journal = f"out{turn}", f"journal{turn}"
    codes, went_on = crews.prune(out=out, resume=journal, time_out=TIME_OUT, victim=victim, after=after)
    others = {0, 1, 2} - {victim}
    if all(codes[rank] == 0 for rank in others):
        return False
    assert codes[victim] == -signal.SIGKILL
    assert [codes[rank] for rank in others] == [1, 1]
    assert went_on < TIME_OUT + 30  # a busy machine needs some time to notice
    for told in crews.errors(others):
        assert told.startswith("error: process ") and told.count("\n") == 1
        assert any(words in told for words in NAMED)
    assert not (crews.folder / out).exists()
    assert crews.prune(out=out, resume=journal)[0] == [0, 0, 0]
    assert content(crews.folder / out) == truth
    return True


def lose(crews, whole, losses, seed):
    rng, done = random.Random(seed), 0
    for turn in range(3 * losses):
        done += lose_one(crews, whole, rng, f"{seed}-{turn}")
        if done == losses:
            return
    pytest.fail(f"only {done} kills of {3 * losses} came in time")


def test_a_process_killed_at_any_moment_is_named_and_the_rerun_has_the_same_bits(crews, whole):
    lose(crews, whole, 1, seed=0)


@pytest.mark.slow
def test_twenty_random_kills_are_twenty_clear_failures_and_twenty_resumes(crews, whole):
    lose(crews, whole, 20, seed=1)
