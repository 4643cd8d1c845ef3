"""No result changes by accident: masks and weights come out as they were recorded.

In the setting of the record every bit must be equal. In another one, counts and errors must be
near. To change a result on purpose, record it again and name the change in the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import cases

RECORD = json.loads(Path(__file__).with_name("golden.json").read_text())
# Their layers share one budget, or prune to an error. Rounding may move a few weights elsewhere.
SHARED = {
    "lenet300",
    "lenet5",
    "grouped_and_transposed",
    "attention",
    "error_budget",
    "kept_count",
    "damped_with_biases",
    "resumed",
    "two_processes",
}
COUNT_TOLERANCE = 0.02
ERROR_TOLERANCE = 0.05


def differences(
    found: dict[str, Any], recorded: dict[str, Any], *, same_setting: bool, shared_budget: bool
) -> list[str]:
    """Return one line for each way in which a run differs from its record."""
    if same_setting and found["digest"] != recorded["digest"]:
        return [f"digest {found['digest']} is not {recorded['digest']}"]
    if list(found["layers"]) != list(recorded["layers"]):
        return [f"layers {list(found['layers'])} are not {list(recorded['layers'])}"]
    lines = []
    for name, (kept, error) in found["layers"].items():
        was_kept, was_error = recorded["layers"][name]
        allowed = COUNT_TOLERANCE * was_kept if shared_budget and not same_setting else 0
        if abs(kept - was_kept) > allowed:
            lines.append(f"{name} keeps {kept}, not {was_kept}")
        if abs(error - was_error) > was_error * (1e-6 if same_setting else ERROR_TOLERANCE):
            lines.append(f"{name} has relative error {error}, not {was_error}")
    return lines


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in parts have another rounding
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_pruning_comes_out_as_recorded(name):
    found = ["not run"]
    # torch's kernels may round by how memory happens to be aligned. The recorded bits must be
    # among three runs.
    for _ in range(3):
        if found:
            ours = cases.record([name])
            found = differences(
                ours["cases"][name],
                RECORD["cases"][name],
                same_setting=all(ours[key] == RECORD[key] for key in cases.setting()),
                shared_budget=name in SHARED,
            )
    assert not found


def test_every_recorded_case_is_run():
    assert set(RECORD["cases"]) == set(cases.CASES) >= SHARED


FOUND = {"digest": "a", "layers": {"fc": [100, 0.10]}}


@pytest.mark.parametrize(
    ("other", "same_setting", "shared_budget", "equal"),
    [
        ({"digest": "a", "layers": {"fc": [100, 0.10]}}, True, False, True),
        ({"digest": "b", "layers": {"fc": [100, 0.10]}}, True, False, False),
        ({"digest": "a", "layers": {"fc": [101, 0.10]}}, True, True, False),
        ({"digest": "a", "layers": {"fc": [100, 0.101]}}, True, True, False),
        ({"digest": "b", "layers": {"fc": [100, 0.10]}}, False, False, True),
        ({"digest": "b", "layers": {"fc": [101, 0.10]}}, False, False, False),
        ({"digest": "b", "layers": {"fc": [101, 0.10]}}, False, True, True),
        ({"digest": "b", "layers": {"fc": [103, 0.10]}}, False, True, False),
        ({"digest": "b", "layers": {"fc": [100, 0.104]}}, False, True, True),
        ({"digest": "b", "layers": {"fc": [100, 0.106]}}, False, True, False),
        ({"digest": "b", "layers": {"gc": [100, 0.10]}}, False, True, False),
    ],
)
def test_the_comparison_sees_what_it_should(other, same_setting, shared_budget, equal):
    found = differences(other, FOUND, same_setting=same_setting, shared_budget=shared_budget)
    assert (not found) == equal
