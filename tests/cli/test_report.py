from __future__ import annotations

import json
import sys

import pytest

import lobs
from lobs.errors import FileError, LobsError
from tests.cli.test_cli import USER_CODE, invoke


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynet.py").write_text(USER_CODE)
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    for name, keep in (("half", "50%"), ("third", "33%")):
        made = invoke(
            "prune",
            "mynet:network",
            "--keep",
            keep,
            "--solver",
            "magnitude",
            "--out",
            f"{name}.safetensors",
        )
        assert made.exit_code == 0
    return tmp_path


def test_saved_results_are_compared_side_by_side(home):
    done = invoke("report", "half.safetensors", "third.safetensors", "--trust", "--json")
    said = json.loads(done.stdout)
    assert [run["label"] for run in said["runs"]] == ["half", "third"]
    assert [run["kept_fraction"] for run in said["runs"]] == pytest.approx([0.5, 0.33], abs=0.01)
    page = (home / "report.html").read_text(encoding="utf-8")
    assert "half against third" in page
    assert '"label":"third"' in page


def test_code_that_a_file_names_is_not_run_for_pictures_without_trust(home):
    done = invoke("report", "half.safetensors", "--label", "mine", "--out", "page.html")
    assert done.exit_code == 0
    assert "mine: some pictures are missing" in done.stdout and "--trust" in done.stdout
    assert "--trust" in (home / "page.html").read_text(encoding="utf-8")


def test_the_command_that_made_a_run_is_in_its_file_and_on_the_page(home):
    record = lobs.load(home / "half.safetensors").record
    assert record["command"].startswith("lobs ")
    assert record["preview"]["totals"] == {"0": 80, "2": 24}


def test_a_compact_file_leaves_the_curves_out_and_the_page_says_so(home):
    assert (
        invoke("export", "half.safetensors", "--trust", "--out", "small.safetensors").exit_code == 0
    )
    assert "preview" not in lobs.load("small.safetensors").record
    assert invoke("report", "small.safetensors", "--no-pictures").exit_code == 0
    assert "the file holds no error curves" in (home / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("nothing.safetensors",), FileError, "no file"),
        (("half.safetensors", "--label", "a", "--label", "b"), LobsError, "2 times for 1 files"),
        (("half.safetensors", "--out", "nowhere/page.html"), FileError, "no folder"),
    ],
)
def test_bad_reports_are_refused_in_words(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        invoke("report", *arguments)


def test_another_network_than_the_one_that_was_pruned_is_not_compared(home, monkeypatch):
    # Of another length, so that no compiled file of the same second is taken for it.
    code = USER_CODE.replace("torch.manual_seed(0)", "torch.manual_seed(12)")
    assert code != USER_CODE
    (home / "mynet.py").write_text(code)
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    done = invoke("report", "half.safetensors", "--trust", "--out", "page.html")
    assert done.exit_code == 0
    assert "mynet:network is not the network that was pruned" in done.stdout
    assert "Same answer on" not in (home / "page.html").read_text(encoding="utf-8")
