from __future__ import annotations

from pathlib import Path

import pytest

from lobs import LobsError
from tests.cli.test_cli import USER_CODE, as_json, invoke

ACCURATE = (
    USER_CODE
    + """
def accuracy():
    model, batches, error = network()
    return model, batches, lambda net: 100 - error(net)
"""
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "ownbudget.py").write_text(ACCURATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "ownbudget:network"


def test_parameters_are_kept_to_the_weight(own):
    assert as_json("prune", own, "--parameters", 30)["kept"] == 30


def test_a_linear_network_spends_two_operations_a_weight(own):
    assert as_json("prune", own, "--flops", 60)["kept"] == 30


def test_bytes_count_values_masks_and_all_that_stays_dense(own):
    done = as_json("prune", own, "--bytes", 400)
    masks, biases = (80 + 7) // 8 + (24 + 7) // 8, 4 * (8 + 3)
    assert done["kept"] == (400 - masks - biases) // 4


def test_floors_and_ceilings_hold_by_glob(own):
    free = as_json("prune", own, "--keep", "30%")["layers"]
    held = as_json(
        "prune", own, "--keep", "30%", "--at-least", "2=90%", "--at-most", "0=20%", "--rounds", 1
    )["layers"]
    assert held[1]["kept_fraction"] >= 0.9 > free[1]["kept_fraction"]
    capped = as_json("prune", own, "--parameters", 20, "--at-most", "*=25%")["layers"]
    assert all(row["kept_fraction"] <= 0.25 for row in capped)


def test_drop_stays_within_and_reports_every_trial(own):
    done = as_json("prune", own, "--drop", 5, "--metric", "error")
    assert done["after"] - done["before"] <= 5
    trials = done["settings"]["trials"]
    assert 1 < len(trials) <= 8 and done["kept"] == min(t["kept"] for t in trials if t["drop"] <= 5)
    # A score is larger for better networks: the negative of an error.
    assert all(-t["score"] - done["before"] == pytest.approx(t["drop"]) for t in trials)


def test_trials_have_a_table_in_the_report(own):
    trials = as_json("prune", own, "--drop", 5, "--metric", "error", "--report", "trials.html")[
        "settings"
    ]["trials"]
    page = Path("trials.html").read_text(encoding="utf-8")
    assert "<h2>Trials</h2>" in page and "'score'" not in page
    assert all(f"<td>{trial['kept']:,}</td>" in page for trial in trials)


def test_the_time_for_exchanging_weights_is_the_users(own):
    assert (
        "seconds=0.5"
        in as_json("prune", own, "--keep", "50%", "--seconds", 0.5)["settings"]["solver"]
    )


def test_what_was_asked_for_is_recorded(own):
    said = as_json(
        "prune",
        own,
        "--keep",
        "50%",
        "--rounds",
        1,
        "--damping",
        0.01,
        "--prune-bias",
        "--no-batch-norm",
    )["settings"]
    assert said["rounds"] == 1 and said["damping"] == 0.01 and said["biases"] == "may be removed"
    assert said["batch norm"] == "not re-estimated"


def test_output_that_cannot_be_written_or_would_be_overwritten_is_refused_before_any_work(
    own, tmp_path, monkeypatch
):
    one = tmp_path / "one.safetensors"
    with pytest.raises(LobsError, match="would overwrite"):
        invoke("prune", own, "--keep", "50%", "--out", one, "--log", one)
    for wrong in ("x.pt", "x.pth", "x.bin"):
        with pytest.raises(LobsError, match=r"lobs writes safetensors: name it 'x.safetensors'"):
            invoke("prune", own, "--keep", "50%", "--out", wrong)
    with pytest.raises(LobsError, match=r"must end in .html: name it 'page.html'"):
        invoke("prune", own, "--keep", "50%", "--report", "page.pdf")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(LobsError, match="read-only"):
        invoke("prune", own, "--keep", "50%", "--out", one)
    assert not one.exists()


def test_a_layer_named_twice_is_refused(own):
    with pytest.raises(LobsError, match="--keep names '0' twice"):
        invoke("prune", own, "--keep", "0=50%,2=20%,0=30%")


def test_a_score_is_larger_the_better_and_metric_error_negates_one(own):
    done = as_json("prune", "ownbudget:accuracy", "--drop", 5)
    assert done["before"] - done["after"] <= 5
    assert done["kept"] == as_json("prune", own, "--drop", 5, "--metric", "error")["kept"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parameters", "30", "--flops", "60"], "exactly one"),
        (["--parameters", "30", "--scope", "layer"], "whole network"),
        (["--keep", "30%", "--metric", "loss"], "use score (larger is better) or error"),
        (["--drop", "much"], "not a number or a percentage"),
        (["--drop", "-1"], "must be finite and not negative"),
        (["--keep", "30%", "--at-least", "0.5"], "names no layer"),
        (["--keep", "30%", "--at-least", "nosuch=0.5"], "nosuch"),
        (["--keep", "30%", "--at-least", "*=0.5"], "loosen"),
        (["--epsilon", "0.1", "--at-most", "*=0.5"], "whole network"),
        (["--pattern", "2:4", "--at-most", "*=0.5"], "not with a pattern"),
        (["--bytes", "10"], "cannot be removed"),
        (["--speedup", "2x", "--latency", "5ms"], "exactly one"),
        (["--speedup", "fast"], "--speedup 'fast' is not a factor"),
        (["--speedup", "0.5x"], "at least 1"),
        (["--speedup", "2x", "--scope", "layer"], "whole network"),
        (["--latency", "5"], "not a time with its unit"),
        (["--latency", "soon ms"], "not a time with its unit"),
        (["--keep", "0=30%", "--at-most", "*=0.5"], "its own fraction"),
    ],
)
def test_what_cannot_be_is_one_clear_line(own, options, said):
    with pytest.raises(LobsError) as caught:
        invoke("prune", own, *options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target", [("--pattern", "2:4"), ("--keep", "50%", "--scope", "layer"), ("--drop", 5)]
)
def test_rounds_are_refused_where_nothing_is_shared_out(own, target):
    with pytest.raises(LobsError, match="--rounds goes with a budget"):
        invoke("prune", own, *target, "--rounds", 3)


@pytest.mark.parametrize(
    ("amount", "field", "value", "word"),
    [
        ({"speedup": "2x"}, "speedup", 2.0, "speedup2x"),
        ({"speedup": " 1.5 "}, "speedup", 1.5, "speedup1.5"),
        ({"latency": "5ms"}, "latency", 5e-3, "latency5ms"),
        ({"latency": "0.2 s"}, "latency", 0.2, "latency0.2s"),
        ({"latency": "200us"}, "latency", 2e-4, "latency200us"),
    ],
)
def test_time_budgets_are_those_of_python(amount, field, value, word):
    from lobs.cli.budgets import Amount

    given = Amount(**amount)
    given.check(None)
    assert getattr(given.target(), field) == pytest.approx(value) and given.words() == word


@pytest.mark.slow
def test_a_network_gets_faster_by_one_command(tmp_path, monkeypatch):
    (tmp_path / "widenet.py").write_text(
        "import torch\nfrom torch import nn\n\ndef network():\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))\n"
        "    return model, list(torch.randn(4, 256, 1024))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = as_json("prune", "widenet:network", "--speedup", "1.5x", "--solver", "magnitude")
    assert done["kept"] < 0.8 * done["total"]
    assert done["settings"]["time"]["predicted speedup"] > 1.3
