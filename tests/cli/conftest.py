from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Commands write into the current folder where no name is given."""
    monkeypatch.chdir(tmp_path)
