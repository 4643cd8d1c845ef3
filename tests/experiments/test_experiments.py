from __future__ import annotations

import pytest
from experiments.dong2017 import _asked_for, few_iterations, readme
from experiments.dong2017.lab import HERE, Lab

STAGED = {
    "iterations": 30,
    "stages": [
        {"iterations": 10, "history": [[0, 9.0], [10, 1.0]]},
        {"iterations": 20, "history": [[0, 5.0], [10, 2.0], [20, 1.5]]},
    ],
}


def test_iterations_count_from_the_first_stage():
    assert few_iterations.history(STAGED) == [(0, 9.0), (10, 1.0), (10, 5.0), (20, 2.0), (30, 1.5)]


def test_an_error_counts_only_once_the_last_stage_is_pruned():
    assert few_iterations.needed(STAGED, 2.0) == 20  # not at 10, where the first stage had 1.0
    assert few_iterations.needed({"iterations": 20, "history": [[0, 5.0], [10, 2.0]]}, 2.0) == 10
    assert few_iterations.needed(STAGED, 0.5) is None


def test_a_whole_name_means_one_row_and_a_part_all_that_hold_it():
    offered = ["lenet5/lobs", "lenet5/lobs-iterative", "lenet300/lobs"]
    chosen = {
        part: [row for row in offered if _asked_for(row, [part], offered)]
        for part in ("lenet5/lobs", "lenet5", "lobs")
    }
    assert chosen == {"lenet5/lobs": ["lenet5/lobs"], "lenet5": offered[:2], "lobs": offered}


def test_the_page_says_what_the_result_files_say():
    assert (HERE / "README.md").read_text() == readme.page(Lab(HERE))


def test_a_fall_of_accuracy_is_told_with_the_error_of_paired_answers():
    assert readme._drop("1" * 100, "1" * 100) == "0.0 ± 0.0"
    # Ten lost and two won among a hundred: mean 0.08, variance 0.12 − 0.08².
    pruned = "5" * 10 + "1" * 80 + "1" * 2 + "1" * 8
    dense = "1" * 10 + "1" * 80 + "0" * 2 + "1" * 8
    assert readme._drop(dense, pruned) == f"8.0 ± {100 * (0.1136 / 100) ** 0.5:.1f}"
    assert float(readme._drop(dense, pruned).split()[0]) == pytest.approx(8.0)
