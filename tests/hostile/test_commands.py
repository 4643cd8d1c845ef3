"""Random command lines: any of them gives a result or one line that says why not."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lobs import LobsError
from lobs.cli import app
from tests.cli.test_cli import USER_CODE
from tests.hostile.running import faults

OWN = ["silent", "wrong", "raises", "needs", "wide", "labels_first", "one_tensor", "odd_score"]
NETWORKS = [
    *["hostile_mine:network"] * 6,
    *(f"hostile_mine:{name}" for name in [*OWN, "bare", "number", ""]),
    *[":network", "no.such:thing", "nothing", "", "/", ".", "../../etc/passwd", "\x00"],
    *["damaged.safetensors", "mine.py"],
]
VALUES = [
    *["0.5", "50%", "0", "1", "-1", "1e400", "nan", "", "0=0.5", "0=0.5,2=10%", "*=0.2", "x=0.5"],
    *["0=", "=", "7", "half", "💥"],
]
OPTIONS = {
    "--keep": VALUES,
    "--sparsity": VALUES,
    "--epsilon": VALUES,
    "--relative": None,
    "--parameters": ["10", "-3", "x"],
    "--bytes": ["200", "0"],
    "--flops": ["50"],
    "--drop": ["0.1", "5%", "-1", "nan"],
    "--metric": ["error", "score", "x"],
    "--scope": ["layer", "network", "galaxy"],
    "--pattern": ["2:4", "4:2", ":", "a:b", "0:0"],
    "--block": ["1x4", "0x0", "x"],
    "--structured": ["units", "inputs", "x"],
    "--solver": ["greedy", "lobs", "magnitude", "none"],
    "--inputs": ["dense", "pruned", "asymmetric", "wet"],
    "--rounds": ["1", "0", "two"],
    "--samples": ["50", "0", "-1", "1000000"],
    "--layers": ["0", "*", "["],
    "--skip": ["2", "*", "none"],
    "--prune-bias": None,
    "--damping": ["0", "1e-3", "-1", "nan", "inf"],
    "--no-batch-norm": None,
    "--force": None,
    "--out": ["out.safetensors", "x.pt", "no/such/folder/x", ".", "/proc/nothing"],
    "--json": None,
    "--report": ["r.html", "no/folder/r.html"],
    "--network": ["hostile_mine:network", "lenet5", "x"],
    "--trust": None,
    "--no-such-option": None,
}


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    (tmp_path / "hostile_mine.py").write_text(USER_CODE)
    (tmp_path / "damaged.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    monkeypatch.chdir(tmp_path)
    yield wrong_command
    sys.modules.pop("hostile_mine", None)


def line(seed):
    rng = random.Random(seed)
    options = ["--keep"] if rng.random() < 0.7 else []
    options += rng.sample(sorted(OPTIONS), rng.choice([0, 0, 1, 1, 2, 3]))
    words = [rng.choice(["prune"] * 12 + ["inspect", "verify", "eval", "shrink"])]
    words += [rng.choice(NETWORKS)] if rng.random() < 0.97 else []
    for option in options:
        words += (
            [option]
            if OPTIONS[option] is None
            else [option, rng.choice(OPTIONS[option][:2] + OPTIONS[option])]
        )
    return words


def wrong_command(seed):
    words = line(seed)
    for made in Path().glob("hostile_mine-*.safetensors"):  # of an earlier line, by default name
        made.unlink()
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit | LobsError):
        return f"{words}: {type(result.exception).__name__}: {result.exception}"
    if isinstance(result.exception, LobsError):
        raise result.exception
    return None if result.exit_code in (0, 1, 2) else f"{words}: exit code {result.exit_code}"


def test_any_command_line_gives_a_result_or_says_why_not(wrong):
    assert faults(wrong, range(100)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 250))
def test_a_thousand_command_lines(wrong, start):
    assert faults(wrong, range(start, start + 250)) == {}
