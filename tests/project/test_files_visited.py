"""A reader who follows one `prune` call opens few files."""

from __future__ import annotations

from benchmarks.files_visited import first_prune, visited

from lobs import targets

MOST_FILES = 58


def test_the_first_prune_visits_few_files():
    first_prune()  # imports every file first: importing does not count
    files = visited(first_prune)
    assert "pruning/api.py" in files
    assert len(files) <= MOST_FILES, files


def test_only_files_whose_functions_run_are_counted():
    assert visited(lambda: None) == []
    assert visited(lambda: targets.Sparsity(0.5)) == ["targets.py"]
