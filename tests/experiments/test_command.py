from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
MEMORY = ["table2", "--rows", "memory", "--quick"]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "experiments.dong2017", *map(str, arguments)]
    return subprocess.run(line, check=False, capture_output=True, text=True, cwd=PROJECT)


def as_json(*arguments: object):
    done = command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_experiment_is_listed():
    listed = as_json("--list")
    assert {
        "table1",
        "table2",
        "first-layer",
        "sensitivity",
        "retraining",
        "resnet",
        "cost",
    } <= set(listed)


def test_a_row_runs_once_and_the_page_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    done = as_json(*MEMORY, "--out", tmp_path)
    path = tmp_path / "results" / "table2-memory.json"
    assert json.loads(path.read_text()) == done[0]
    assert (tmp_path / "pictures" / "memory.png").stat().st_size > 5_000
    assert "pictures/memory.png" in (tmp_path / "README.md").read_text()
    before = path.stat().st_mtime_ns
    as_json(*MEMORY, "--out", tmp_path)
    assert path.stat().st_mtime_ns == before
    as_json(*MEMORY, "--out", tmp_path, "--again")
    assert path.stat().st_mtime_ns != before
    as_json(*MEMORY, "--out", tmp_path, "--seed", 1)
    assert json.loads(path.read_text())["seed"] == 1  # a result of another seed is not this one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table2", "--rows", "nothing"), "matches no row"),
        (("table9",), "there is no experiment 'table9'"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path, arguments, message):
    done = command(*arguments, "--out", tmp_path)
    assert done.returncode == 1
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
