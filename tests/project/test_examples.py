"""Every example runs to its last assert, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lobs

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples():
    assert {"own_cnn", "retrain", "text_encoder", "two_four"} <= {path.stem for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    if "transformers" in path.read_text() and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    settings = {
        **os.environ,
        "PYTHONPATH": str(Path(lobs.__file__).parent.parent),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=settings,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
