"""Time and memory are accounted for, in the result and in the log."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError
from lobs._system.run_log import peak_bytes, phase, recorded_run


def test_only_the_outermost_work_counts_so_that_totals_add_up():
    with recorded_run() as seen:
        for _ in range(2):
            with phase("inputs of fc1"), phase("solve"):
                time.sleep(0.01)
    assert list(seen.seconds) == ["inputs"] and 0.02 <= seen.seconds["inputs"] < 1


def test_without_an_observer_nothing_is_kept():
    with phase("anything"):
        pass
    with recorded_run() as seen:
        pass
    assert seen.seconds == {}


def run(path=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return lobs.prune(
        model,
        [torch.randn(50, 6)],
        lobs.Sparsity(0.5),
        progress=False,
        execution=lobs.Execution(log=path),
    )


def test_the_log_is_lines_of_json_that_pair_beginnings_with_ends(tmp_path):
    result = run(tmp_path / "log.jsonl")
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    count = {
        kind: sum(e["event"] == kind for e in events)
        for kind in ("begin", "end", "layer", "failed")
    }
    assert count["begin"] == count["end"] > 4 and count["failed"] == 0
    assert {e["layer"] for e in events if e["event"] == "layer"} == {"0", "2"}
    assert all(e["peak_bytes"] > 1e6 and e["time"] > 1e9 for e in events)
    assert sum(result.phases.values()) <= result.seconds
    assert {"calibrate", "influence", "error curves", "solve", "measure"} <= result.phases.keys()
    assert result.record()["phases"] == result.phases and result.peak_bytes == pytest.approx(
        peak_bytes(), rel=0.5
    )
    assert "seconds (calibrate" in result.summary()


def test_work_that_fails_says_so_in_the_log(tmp_path):
    model = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(LobsError):
        lobs.prune(
            model,
            [torch.full((2, 6), torch.nan)],
            lobs.Sparsity(0.5),
            progress=False,
            execution=lobs.Execution(log=tmp_path / "log"),
        )
    assert [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()] == [
        "begin",
        "failed",
    ]


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LobsError, match="cannot write"):
        run(tmp_path / "no" / "folder")
