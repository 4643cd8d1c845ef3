"""The attack of `benchmarks/attack.py`, with a twentieth of its tries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_nothing_breaks():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attack", "--scale", "0.05"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 failed") == 6
