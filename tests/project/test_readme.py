"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 3


def test_every_command_in_the_readme_exists():
    from lobs.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    shown = set(re.findall(r"^lobs (\w+)", (ROOT / "README.md").read_text(), flags=re.M))
    assert shown <= known and len(shown) >= 6
