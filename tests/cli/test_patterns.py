from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from lobs import load, save
from lobs.cli import app
from lobs.errors import LobsError

USER_CODE = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    first = [nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU()]
    model = nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(200, 12)
    return model, [x[:100], x[100:]], lambda net: float(net(x).detach().norm())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "patterned.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*args):
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def prune(*args):
    return call("prune", "patterned:network", *args, "--out", "p.safetensors")


def test_n_by_m_from_the_shell(folder):
    assert prune("--pattern", "2:4").exit_code == 0
    masks = load("p.safetensors").masks
    assert bool((masks["0.weight"].view(8, 3, 4).sum(-1) == 2).all())
    prune("--pattern", "0=1:4,3=2:4")
    masks = load("p.safetensors").masks
    assert bool((masks["0.weight"].view(8, 3, 4).sum(-1) == 1).all()) and bool(
        masks["5.weight"].all()
    )


def test_n_by_m_along_channels_is_recorded_and_kept(folder):
    assert prune("--pattern", "2:4", "--along", "channels").exit_code == 0
    assert "along='channels'" in load("p.safetensors").record["settings"]["target"]


def test_a_pattern_is_in_the_report(folder):
    assert prune("--pattern", "2:4", "--report", "r.html").exit_code == 0
    page = (folder / "r.html").read_text(encoding="utf-8")
    assert "NByM(n=2, m=4" in page and "statistics of 1 batch norm " in page


def test_blocks_from_the_shell(folder):
    prune("--block", "2x4", "--sparsity", "50%")
    mask = load("p.safetensors").masks["0.weight"].view(4, 2, 3, 4)
    assert (
        torch.equal(mask.any(3).any(1), mask.all(3).all(1)) and int(mask.any(3).any(1).sum()) == 6
    )


def test_units_from_the_shell_shrink_and_open_again(folder):
    done = prune("--structured", "units", "--sparsity", "50%")
    assert "statistics of 1 batch norm " in done.output
    assert call("verify", "p.safetensors", "--trust").exit_code == 0
    shrunk = call("shrink", "p.safetensors", "--trust", "--out", "small.safetensors", "--json")
    document = json.loads(shrunk.output)
    assert document["shrinkage"]["channels"] == {"0": [8, 4], "3": [8, 4], "5": [3, 3]}
    assert document["after"] == pytest.approx(document["before"], rel=1e-5)
    again = json.loads(call("eval", "small.safetensors", "--trust", "--json").output)
    assert document["after"] == pytest.approx(again["value"])


MIXTURE = """
from tests.pruning.test_experts import data, network

def mixture():
    model, batches = network(), data()
    return model, batches, lambda net: sum(float(net(x).detach().norm()) for x in batches)
"""


def test_experts_leave_from_the_shell_and_the_file_opens_again(folder):
    (folder / "mixed.py").write_text(MIXTURE)
    words = "prune", "mixed:mixture", "--structured", "experts"
    done = call(*words, "--keep", "50%", "--out", "small.safetensors", "--report", "r.html")
    assert done.exit_code == 0 and "Experts: 6 → 3 in each of 2 mixtures." in done.output
    assert call("verify", "small.safetensors", "--trust").exit_code == 0
    again = json.loads(call("eval", "small.safetensors", "--trust", "--json").output)
    assert again["value"] == pytest.approx(load("small.safetensors").record["after"])
    assert (folder / "r.html").is_file()
    saved = load("small.safetensors")
    saved.record["settings"]["experts"]["removed"] = {"nowhere": [0]}
    save(saved.state_dict, "odd.safetensors", saved.masks, saved.record)
    with pytest.raises(LobsError, match="does not fit mixed:mixture: experts that left it"):
        call("eval", "odd.safetensors", "--trust")
    for more, says in (
        (("--dry-run",), "--dry-run does not go with --structured experts"),
        (("--memory", "2GB"), "--memory does not go with --structured experts"),
        (("--skip", "0"), "skip does not go with what='experts'"),
    ):
        with pytest.raises(LobsError, match=says):
            call(*words, "--keep", "50%", "--out", "other.safetensors", *more)
    with pytest.raises(LobsError, match="has no experts that lobs can take out"):
        prune("--structured", "experts", "--keep", "50%")


def test_batch_norm_can_be_left_alone(folder):
    done = prune("--sparsity", "50%", "--no-batch-norm")
    assert "batch norms" not in done.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--pattern", "2by4"), "not n:m"),
        (("--pattern", "0=2:4,3=1:8"), "with one m"),
        (("--pattern", "6:4"), "0 ≤ n ≤ m"),
        (("--pattern", "2:4", "--along", "rows"), "use 'columns' or 'channels'"),
        (("--along", "channels", "--keep", "0.5"), "--along goes with --pattern"),
        (
            ("--seconds", "1", "--solver", "greedy", "--keep", "0.5"),
            "--seconds limits the local search of --solver auto",
        ),
        (("--block", "4", "--keep", "0.5"), "ROWSxCOLUMNS"),
        (("--structured", "rows", "--keep", "0.5"), "use 'units', 'inputs' or 'experts'"),
        (("--structured", "units", "--epsilon", "0.5"), "goes with --keep or --sparsity"),
        (("--structured", "units", "--block", "1x4", "--keep", "0.5"), "give one of"),
        (("--pattern", "2:4", "--scope", "network"), "each layer's own"),
        (("--pattern", "2:4", "--prune-bias"), "does not go with patterns"),
    ],
)
def test_wrong_patterns_are_refused_in_words(folder, args, says):
    with pytest.raises(LobsError, match=says):
        prune(*args)
