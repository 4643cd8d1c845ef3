"""A process killed at any moment ends the others in one line; a rerun ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lobs._system.distributed import launched_group
from lobs.errors import ProcessGroupError
from tests.processes import Commands, content

pytestmark = pytest.mark.xdist_group(
    "groups"
)  # one of the test runner's processes makes what they all need
TIME_OUT = 10
NAMED = ("has lost another", "could not find the others")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("groups"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(groups):
    """What an uninterrupted run of three gives, and how long it takes."""
    codes, seconds = groups.prune(out="whole", resume="uninterrupted")
    assert codes == [0, 0, 0]
    return content(groups.folder / "whole"), seconds


def lose_one(groups, whole, rng, turn):
    """Kill one of three at a random moment and run again. False where the others had finished."""
    truth, seconds = whole
    victim, after = rng.randrange(3), rng.random() * seconds
    out, run_store = f"out{turn}", f"run_store{turn}"
    codes, went_on = groups.prune(
        out=out, resume=run_store, time_out=TIME_OUT, victim=victim, after=after
    )
    others = {0, 1, 2} - {victim}
    if all(codes[rank] == 0 for rank in others):
        return False
    assert codes[victim] == -signal.SIGKILL
    assert [codes[rank] for rank in others] == [1, 1]
    assert went_on < TIME_OUT + 30  # a busy machine needs some time to notice
    for told in groups.errors(others):
        lines = [line for line in told.splitlines() if not line.startswith("[")]  # no progress
        assert len(lines) == 1 and lines[0].startswith("error: process "), told
        assert any(words in told for words in NAMED)
    assert not (groups.folder / out).exists()
    assert groups.prune(out=out, resume=run_store)[0] == [0, 0, 0]
    assert content(groups.folder / out) == truth
    return True


def lose(groups, whole, losses, seed):
    rng, done = random.Random(seed), 0
    for turn in range(3 * losses):
        done += lose_one(groups, whole, rng, f"{seed}-{turn}")
        if done == losses:
            return
    pytest.fail(f"only {done} kills of {3 * losses} came in time")


def test_an_error_in_the_score_reaches_all_processes_as_itself(groups):
    words = ["prune", "mine:without_labels", "--drop", "1%", "--out", "none"]
    codes, _ = groups.ended([*words, "--time-out", "60"])
    assert codes == [1, 1, 1]
    for told in groups.errors(range(3)):
        assert "the labels are on another disk" in told and "has lost another" not in told
    assert not (groups.folder / "none").exists()


def test_a_process_killed_at_any_moment_is_named_and_the_rerun_has_the_same_bits(groups, whole):
    lose(groups, whole, 1, seed=0)


@pytest.mark.slow
def test_twenty_random_kills_are_twenty_clear_failures_and_twenty_resumes(groups, whole):
    lose(groups, whole, 20, seed=1)


@pytest.mark.slow
def test_torchrun_ends_when_one_of_its_processes_is_killed_and_goes_on_when_it_is_started_again(
    groups, whole
):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
    ]
    words = [
        "-m",
        "lobs",
        "prune",
        "mine:network",
        "--keep",
        "30%",
        "--out",
        "torchrun",
        "--resume",
        "elastic",
    ]
    how = {"cwd": groups.folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    with subprocess.Popen(
        [*launch, *words], **how, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as agent:
        while not (groups.folder / "elastic" / "calibration.safetensors").exists():
            assert agent.poll() is None, agent.communicate()
            time.sleep(0.001)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)  # its parent will wait for it, and has not yet
        told = agent.communicate(timeout=120)[1]
    assert agent.returncode != 0
    assert "SIGKILL" in told
    assert not (groups.folder / "torchrun").exists()
    subprocess.run([*launch, *words], **how, check=True, capture_output=True)
    assert content(groups.folder / "torchrun") == whole[0]


def test_processes_that_never_come_are_given_up_on(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: never.wait())
    monkeypatch.setattr("lobs._system.distributed._GRACE", 0.0)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    words = (
        r"process 1 of 3 could not find the others through 10\.0\.0\.1:29500 in 0\.1 seconds .* "
        "start all of them again"
    )
    with pytest.raises(ProcessGroupError, match=words), launched_group(0.1):
        pass
    never.set()
