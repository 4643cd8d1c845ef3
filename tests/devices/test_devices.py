"""Main paths run on a device that is not the CPU, and a planted mistake does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ["hold"]  # it prunes too; all others take a minute


def ran(*words):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.devices.paths", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", [QUICK, pytest.param([], marks=pytest.mark.slow)])
def test_no_path_mixes_devices(words):
    found = ran(*words)
    assert len(found) >= len(words) and found
    assert found == dict.fromkeys(found)


@pytest.mark.slow
def test_a_planted_mistake_is_found():
    (said,) = ran("--plant", "defaults").values()
    assert said is not None
    assert "same device" in said
