"""The page about two folders, and tasks of the harness."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from types import ModuleType

import pytest
import typer

import lobs
from lobs.zoo.hub import Reading
from tests.hub.networks import sentences, written
from tests.hub.shell import lobs_command

pytest.importorskip("transformers")
FEW = Reading(samples=16, length=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder's folder, dense and pruned with a report, and a text."""
    home = tmp_path_factory.mktemp("pages")
    big = written(home / "big")
    (home / "text.txt").write_text("\n".join(sentences(200)))
    return home, big, home / "text.txt"


def test_prune_and_compare_write_a_page(folders, capsys):
    home, big, text = folders
    how = ["--data", text, "--length", 16]
    said = lobs_command(
        "prune", big, "--keep", "50%", *how, "--samples", 16, "--refit", "layers",
        "--out", home / "small", "--report", home / "run.html", capsys=capsys,
    )  # fmt: skip
    assert f"report: {home / 'run.html'}" in said
    page = (home / "run.html").read_text()
    record = json.loads((home / "small" / "lobs.json").read_text())
    assert "held-out samples" in page and "Perplexity" in page
    assert f"{record['after']['perplexity']:.4g}" in page  # the same held-out samples
    for layer in record["layers"]:
        assert layer["name"] in page
    said = lobs_command(
        "compare", home / "small", big, *how, "--report", home / "both.html",
        "--prompt", "the cat", capsys=capsys,
    )  # fmt: skip
    page = (home / "both.html").read_text()
    assert "agreement" in said and "<svg" in page and "KL(dense ‖ pruned)" in page
    assert "src=" not in page and "http" not in page.replace("http-equiv", "")


def test_words_that_only_one_network_writes_are_marked():
    from lobs.report.folder import render

    metrics = {"small": {"perplexity": 3.0}, "dense": {"perplexity": 2.0}}
    texts = [{"prompt": "<b>a", "dense": "the red cat", "small": "the blue cat"}]
    page = render(
        {"small": "x/small", "dense": "x/big", "metrics": metrics, "generations": texts}, "lobs …"
    )
    assert "<mark>red</mark>" in page and "<mark>blue</mark>" in page
    assert "<b>a" not in page and "&lt;b&gt;a" in page  # a text is no markup
    assert "<mark>the</mark>" not in page and "Perplexity 2 → 3." in page


@pytest.mark.parametrize("samples", [2, 8, 100, 101, 1000])
def test_no_mark_of_the_chart_hides_another(samples):
    from lobs.report.folder import _losses

    chart = _losses([(1 + i / samples, 1 + i / samples) for i in range(samples)])
    places = [x for x, *_ in chart["lines"]]
    nearest = min(b - a for a, b in itertools.pairwise(places))
    assert 2 * chart["ring"] + chart["stroke"] < nearest  # rings of neighbours are apart
    assert 3 <= chart["dot"] < chart["ring"] - chart["stroke"] / 2  # a dot fits into its ring
    ends = {chart["lines"][0][3], chart["lines"][-1][3]}
    assert ends == {"dense 1.000, pruned 1.000", f"dense {2 - 1 / samples:.3f}, pruned "
                    f"{2 - 1 / samples:.3f}"}  # fmt: skip


def test_a_report_needs_two_folders_and_a_page(folders, capsys):
    home, big, text = folders
    for words, why in (
        (["prune", big, "--keep", "50%", "--data", text, "--report", home / "x.txt"], "html"),
        (["prune", "timm:x", "--keep", "50%", "--data", text, "--report", "x.html"], "--report"),
        (["compare", big, big, "--data", text, "--report", home / "x.txt"], "html"),
    ):
        with pytest.raises(lobs.LobsError, match=why):
            lobs_command(*words, capsys=capsys)


def test_an_interrupt_says_that_the_same_command_continues(folders, tmp_path, monkeypatch, capsys):
    from lobs.cli import app
    from lobs.pruning import folder_walk

    _, big, text = folders
    write, calls = folder_walk.write_shard, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(folder_walk, "write_shard", interrupted)
    words = ["prune", big, "--keep", "50%", "--data", text, "--length", 16, "--samples", 16,
             "--refit", "layers", "--out", tmp_path / "small"]  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt, typer.Abort):
        assert app([str(word) for word in words], standalone_mode=False) == 130
    assert f"'{tmp_path / 'small'}' keeps the finished blocks" in capsys.readouterr().err
    monkeypatch.setattr(folder_walk, "write_shard", write)
    lobs_command(*words, capsys=capsys)
    assert all(finding.holds for finding in lobs.hub.verify(tmp_path / "small"))


class Harness(ModuleType):
    """A module with the parts of lm_eval that are used, called as its documentation says."""

    def __init__(self):
        super().__init__("lm_eval")
        self.seen = []

    def simple_evaluate(self, *, model, tasks, limit, task_manager):
        import torch

        assert isinstance(model.network, torch.nn.Module) and model.tokenizer("the cat")
        if "broken" in tasks:
            raise ValueError("no such task:\n broken")
        self.seen.append((tasks, limit, task_manager.folder))
        zeros = sum(int((p == 0).sum()) for p in model.network.parameters())
        values = {"alias": "t", "acc,none": 1.0 / (1 + zeros), "acc_stderr,none": 0.1,
                  "em,strict": 0.25}  # fmt: skip
        return {"results": dict.fromkeys(tasks, values), "versions": {}}


@pytest.fixture
def harness(monkeypatch):
    """Put the harness's stand-in where it would be imported from."""
    found = Harness()

    class HFLM:
        def __init__(self, *, pretrained, tokenizer, batch_size):
            self.network, self.tokenizer = pretrained, tokenizer

    class TaskManager:
        def __init__(self, include_path=None):
            self.folder = include_path

    models, tasks = ModuleType("lm_eval.models.huggingface"), ModuleType("lm_eval.tasks")
    models.HFLM, tasks.TaskManager = HFLM, TaskManager
    for module in (found, ModuleType("lm_eval.models"), models, tasks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_tasks_of_the_harness_score_both_networks(folders, harness, tmp_path):
    _, big, text = folders
    small = tmp_path / "small"
    lobs.hub.prune(big, text, keep=0.5, out=small, reading=FEW, refit="layers", progress=False)
    found = lobs.hub.compare(
        small, big, text, reading=FEW, tasks=["own"], limit=3, own_tasks=tmp_path
    )
    assert harness.seen == [(["own"], 3, str(tmp_path))] * 2
    own = found["tasks"]["own"]
    assert own["dense"]["acc"] > own["small"]["acc"] and own["small"]["em,strict"] == 0.25
    assert set(own["dense"]) == {"acc", "em,strict"}
    from lobs.report.folder import render

    assert "em,strict 0.25" in render(found, "lobs …")
    with pytest.raises(lobs.LobsError, match=r"cannot run broken \(ValueError: no such task: br"):
        lobs.hub.compare(small, big, text, reading=FEW, tasks=["broken"])
    with pytest.raises(lobs.LobsError, match="give a list of names"):
        lobs.hub.compare(small, big, text, reading=FEW, tasks="own")


def test_without_the_harness_one_line_says_how_to_get_it(folders, monkeypatch, capsys):
    _, big, text = folders
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(lobs.LobsError, match=r"pip install 'lobs\[lm-eval\]'"):
        lobs_command("compare", big, big, "--data", text, "--tasks", "arc_easy", capsys=capsys)
