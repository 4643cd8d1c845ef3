"""What a newcomer meets: names of files, own networks saved from Python, tables at 80 columns."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest
import torch

import lobs
from lobs import LobsError
from lobs.cli.bench import next_steps
from lobs.cli.files import default_name
from lobs.cli.output import Column, fitting, notes, print_table
from tests.cli.test_cli import as_json, invoke, run

OWN = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(200, 10)
    with torch.no_grad():
        y = model(x).argmax(1)
    def accuracy(net):
        return float((net(x).argmax(1) == y).float().mean())
    return model, [(x[:100], y[:100]), (x[100:], y[100:])], accuracy

def unlabelled():
    model, batches, accuracy = network()
    return model, [x for x, _ in batches], accuracy
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A network of one's own, and a file of it that Python saved without a word about its code."""
    (tmp_path / "firstuse.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "firstuse", raising=False)
    model, batches, _ = importlib.import_module("firstuse").network()
    result = lobs.prune(model, batches, keep=0.5, solver="magnitude", progress=False)
    result.save("own.safetensors")
    return "own.safetensors"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--keep", "7%"), "lenet300-keep7.safetensors"),
        (("--keep", "0.125"), "lenet300-keep12.5.safetensors"),
        (("--sparsity", "90%"), "lenet300-keep10.safetensors"),
        (("--keep", "fc1=5%,fc*=20%"), "lenet300-pruned.safetensors"),
        (("--pattern", "2:4"), "lenet300-2of4.safetensors"),
        (("--keep", "50%", "--structured", "units"), "lenet300-keep50-units.safetensors"),
        (("--keep", "50%", "--block", "1x4"), "lenet300-keep50-block1x4.safetensors"),
        (("--parameters", "20000"), "lenet300-20000weights.safetensors"),
        (("--drop", "0.5%"), "lenet300-drop0.5.safetensors"),
        (("--epsilon", "0.1"), "lenet300-epsilon0.1.safetensors"),
    ],
)
def test_the_file_is_named_after_the_network_and_said_before_the_work(options, name, tmp_path):
    (tmp_path / name).write_text("taken")
    with pytest.raises(LobsError, match=re.escape(f"'{name}' exists: overwrite it with --force")):
        invoke("prune", "lenet300", *options)


def test_any_network_gives_a_plain_file_name():
    assert default_name("a.b:c") == "a.b-c.safetensors"
    assert default_name("x/../y z.compact.safetensors", "keep1") == "y-z-keep1.safetensors"
    assert default_name(":", ending=".onnx") == "network.onnx"


def test_files_saved_from_python_open_with_network_in_every_command(own):
    with pytest.raises(LobsError, match="Add --network mycode:network"):
        invoke("eval", own)
    code = ("--network", "firstuse:network")
    value = as_json("eval", own, *code)["value"]
    assert 0 < value <= 1
    assert as_json("verify", own, *code)["holds"]
    assert as_json("bench", own, *code, "--batch", 2, "--seconds", 0.01)["batches"]
    assert as_json("report", own, *code)["runs"][0]["note"] == ""
    shrunk = as_json("shrink", own, *code)
    assert shrunk["network"] == "own-shrunk.safetensors"
    assert shrunk["before"] == shrunk["after"] == value
    exported = as_json("export", own, *code)
    assert exported["out"] == "own.compact.safetensors"
    assert as_json("eval", exported["out"], "--trust")["value"] == value
    done = as_json("retrain", own, *code, "--iterations", 3, "--every", 1)
    assert done["path"] == "own-retrained.safetensors" and len(done["history"]) == 4
    masks, after = lobs.load(own).masks, lobs.load(done["path"])
    assert all(not bool(after.state_dict[n][~m].any()) for n, m in masks.items())


def test_a_file_that_names_its_network_needs_trust_or_the_name_typed(own):
    model, batches, _ = sys.modules["firstuse"].network()
    result = lobs.prune(model, batches, keep=0.5, solver="magnitude", progress=False)
    result.save("named.safetensors", network="firstuse:network")
    with pytest.raises(LobsError, match="Add --trust"):
        invoke("eval", "named.safetensors")
    typed = as_json("eval", "named.safetensors", "--network", "firstuse:network")["value"]
    assert typed == as_json("eval", "named.safetensors", "--trust")["value"]
    with pytest.raises(LobsError, match="says what a file holds, and 'firstuse:network' is no"):
        invoke("eval", "firstuse:network", "--network", "lenet5")


def test_an_own_network_is_retrained_on_labels_or_on_the_dense_outputs(own):
    code = ("--network", "firstuse:unlabelled")
    with pytest.raises(LobsError, match="have no labels"):
        invoke("retrain", own, *code)
    taught = as_json("retrain", own, *code, "--distil", "--iterations", 2, "--every", 1)
    assert len(taught["history"]) == 3
    with pytest.raises(LobsError, match="--batch goes with zoo networks"):
        invoke("retrain", own, "--network", "firstuse:network", "--batch", 5, "--force")
    done = as_json("stages", "firstuse:network", "--stages", "60%:2;30%:2", "--solver", "magnitude")
    assert [round(s["kept_fraction"], 1) for s in done["stages"]] == [0.6, 0.3]
    assert done["path"] == "firstuse-network-staged.safetensors"


def test_retraining_stops_at_the_metric_in_its_own_direction(own):
    code = ("--network", "firstuse:network", "--force", "--iterations", 5, "--every", 1)
    good = as_json("retrain", own, *code, "--until", 0.0)  # any accuracy is good enough
    assert good["reached"] and good["iterations"] == 0
    low = as_json("retrain", own, *code, "--until", 0.0, "--metric", "error")
    assert low["iterations"] == 5 and not low["reached"]


def test_a_drop_of_the_zoo_is_a_share_of_accuracy():
    with pytest.raises(LobsError, match=r"--drop 5 is 500% of accuracy; did you mean 5%\?"):
        invoke("prune", "lenet300", "--drop", "5", "--samples", 100)


@pytest.mark.parametrize("name", ["sweep.csv", "sweep.png"])
def test_a_sweep_into_a_file_makes_no_folder_of_that_name(own, tmp_path, name):
    few = ("--points", 2, "--no-paper", "--solver", "magnitude")
    assert invoke("sweep", "firstuse:network", *few, "--out", name).exit_code == 0
    assert (tmp_path / "sweep.csv").is_file() and not (tmp_path / "sweep.png").is_dir()


def test_a_sweep_begins_with_what_prune_does_and_speaks_the_metric(own):
    done = as_json("sweep", "firstuse:network", "--start", "60%", "--stop", "20%", "--points", 3)
    ours, paper = done["methods"]
    assert ours["method"] == "lobs prune" and paper["method"] == "L-OBS as published"
    pruned = as_json("prune", "firstuse:network", "--keep", "60%")
    assert ours["points"][0]["metric"] == pruned["after"]
    assert ours["points"][0]["kept_fraction"] == pruned["kept_fraction"]


def widths(text):
    return [len(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("command", "heads"),
    [
        (
            ("inspect", "lenet5", "--samples", 100),
            ["layer", "shape", "weights", "5%", "50%", "95%"],
        ),
        (
            ("bench", "lenet300", "--batch", 1, "--seconds", 0.01),
            ["layer", "kept", "dense µs", "fastest µs", "chosen", "faster"],
        ),
        (("export", "lenet300"), ["tensor", "kept", "stored B", "dense B"]),
    ],
)
def test_tables_are_whole_at_80_columns(command, heads, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(*command).stdout
    header = next(line for line in text.splitlines() if line.startswith(heads[0]))
    assert all(head in header for head in heads)
    assert max(widths(text)) <= 80 and "…" not in text


def test_a_long_layer_name_is_folded_and_never_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    name = "encoder.layer.11.attention.self.query.projection.weight.of.the.first.head"
    print_table("a table", ["layer", Column("shape", 1), "kept"], [[name, "768×768", "10 %"]])
    text = capsys.readouterr().out
    assert max(widths(text)) <= 60 and "…" not in text
    assert name in "".join(line.split("  ")[0].strip() for line in text.splitlines()[2:-1])
    assert "not shown at 60 columns: shape (--json has them)" in text


def test_columns_are_left_out_by_rank_and_rank_0_stays():
    columns = [Column("a"), Column("b" * 10, 1), Column("c" * 10, 2), Column("d" * 10)]
    rows = [["1", "2", "3", "4"]]
    assert fitting(columns, rows, 100) == [0, 1, 2, 3]
    assert fitting(columns, rows, 27) == [0, 1, 3]
    assert fitting(columns, rows, 13) == [0, 3]
    assert fitting(columns, rows, 1) == [0, 3]


def test_notes_about_layers_are_one_line_after_the_result(own):
    result = invoke("prune", "firstuse:network", "--keep", "40%", "--samples", 1)
    assert result.exit_code == 0
    code, _, err = run("inspect", "lenet5", "--samples", 100)
    assert code == 0, err
    found = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(found) == 1
    assert re.match(r"note: \d layers had fewer samples than inputs \(.*100 samples for", found[0])


def test_the_same_note_of_two_runs_comes_once(capsys):
    from lobs.errors import note_layer, warning_once

    with notes():
        for _ in range(2):
            with warning_once():
                note_layer("regularised", "fc1", "3 of 4 inputs are dead or duplicated", "")
    assert capsys.readouterr().err.count("note: 1 layer needed regularisation (fc1: 3 of 4") == 1


def test_the_demo_says_how_this_program_is_called(monkeypatch, tmp_path):
    from lobs.cli.demo import _program

    script = tmp_path / "bin" / "lobs"
    script.parent.mkdir()
    script.touch()
    calls = {"lobs": "lobs", "src/lobs/__main__.py": "python -m lobs", str(script): str(script)}
    monkeypatch.setattr("shutil.which", lambda _: None)
    for place, call in calls.items():
        monkeypatch.setattr(sys, "argv", [place, "demo"])
        assert _program() == call


class Timed:
    """A result of `accelerate`, as far as advice needs one."""

    def __init__(self, speed, **kept):
        from lobs._system.stopwatch import Interval
        from lobs.deploy.accelerate.layerwise import LayerTiming

        self.speedup = Interval(speed, speed, speed)
        self.layers = [
            LayerTiming(name, (4, 4), share, {"dense": seconds}, "dense", 1.0)
            for name, (share, seconds) in kept.items()
        ]


def test_no_speed_up_is_followed_by_what_to_try():
    model = torch.nn.Module()
    model.conv, model.fc = torch.nn.Linear(4, 4), torch.nn.Linear(40, 40)
    slow = Timed(1.0, conv=(0.6, 9e-6), fc=(0.02, 1e-6))
    text = "\n".join(next_steps("small.safetensors", model, [slow]))
    assert "'conv' takes 90% of the time and keeps 60.0%" in text
    assert all(word in text for word in ("--flops", "--structured units", "--at-most 'conv=5%'"))
    assert next_steps("small.safetensors", model, [slow, Timed(1.4)]) == []
    dense = Timed(1.0, conv=(1.0, 9e-6), fc=(1.0, 1e-6))
    assert next_steps("lenet5", model, [dense])[1] == "  lobs prune lenet5 --keep 10%"


def test_json_of_bench_holds_the_advice():
    done = as_json("bench", "lenet300", "--batch", 1, "--seconds", 0.01)
    if done["batches"][0]["speedup"]["middle"] == 1:
        assert "Prune first" in done["next"][0]
    assert json.dumps(done)
