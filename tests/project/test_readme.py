"""What the README shows runs, and its numbers are those of docs/chart.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks import chart

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 3


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 200


def test_every_command_in_the_readme_exists():
    from lobs.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    shown = set(re.findall(r"^lobs (\w+)", TEXT, flags=re.M))
    assert shown <= known and len(shown) >= 5


def test_its_numbers_are_the_measured_ones():
    numbers = json.loads((ROOT / "docs/chart.json").read_text(encoding="utf-8"))
    assert chart.filled(TEXT, numbers) == TEXT
    assert len(chart.bullets(numbers)) == 6
    wrong = numbers | {"threads": numbers["threads"] + 1}
    assert chart.filled(TEXT, wrong) != TEXT


def test_the_chart_puts_every_method_on_the_same_points():
    measured = json.loads((ROOT / "docs/chart.json").read_text(encoding="utf-8"))["chart"]
    assert list(measured["error_percent"]) == list(chart.COLOURS)
    assert {len(values) for values in measured["error_percent"].values()} == {len(chart.KEPT)}
    assert measured["kept_percent"] == list(chart.KEPT)
