"""A result describes itself in plain words and does the next step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lobs
from lobs import Certificate, LobsError
from lobs.cli import app
from lobs.deploy import Acceleration
from lobs.pruning.result import LayerResult


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    return lobs.prune(model, [torch.randn(80, 12)], keep=0.1, progress=False)


def test_the_summary_leads_with_the_gain(result):
    first, change, *rest = result.summary().splitlines()
    assert change.startswith("Output change: ") and "of the output's norm" in change
    assert first == "10× fewer weights: 32 of 320 kept (10.00 %)."
    assert rest[0].split() == ["layer", "shape", "kept", "rel.", "error", "seconds"]
    for row, layer in zip(rest[1:3], result.layers, strict=True):
        assert row.startswith(layer.name) and f"{layer.kept} (" in row
    assert all(len(line) <= 100 for line in rest[:3])


@pytest.mark.parametrize(
    ("kept", "lead"), [(320, "No weight was removed"), (0, "All weights were removed")]
)
def test_the_summary_of_extremes_claims_no_gain(result, kept, lead):
    layer = LayerResult("fc", (16, 20), kept, 320, 0.0, 0.0, 0.0, 0.0, 80)
    assert replace(result, layers=(layer,)).summary().startswith(f"{lead}: {kept} of 320 kept")


@pytest.mark.parametrize(
    ("certificate", "line"),
    [
        (Certificate(0.75, 0.9, 0.5), "0.5 measured, at most 0.75 proven (root mean square"),
        (Certificate(0.75, 0.9, 0.75), "0.75 measured (root mean square"),
        (Certificate(0.75, 0.9), "at most 0.75 proven (root mean square"),
        (Certificate(0.75, 0.9, 0.5, held_out=0.6), "0.5 measured, 0.6 on held-out inputs, at"),
        (Certificate(None, None, 0.5, reason="a loop"), "0.5 measured (root mean square"),
    ],
)
def test_the_summary_says_how_far_the_output_moved(result, certificate, line):
    text = replace(result, certificate=certificate).summary()
    assert f"Output change: {line}" in text
    assert ("No bound: a loop." in text) == (certificate.bound is None)


def test_many_layers_of_one_kind_share_a_line(result):
    from lobs.pruning.summary import short_table, table

    first = result.layers[0]
    layers = [
        replace(first, name=f"model.layers.{i}.{part}", relative_error=i / 100)
        for i in range(30)
        for part in ("fc1", "fc2")
    ]
    lines = short_table([*layers, replace(first, name="last")])
    assert [line.split()[0] for line in lines] == [
        "layer", "model.layers.*.fc1", "model.layers.*.fc2", "last",
    ]  # fmt: skip
    assert "(30 layers)" in lines[1] and f"{30 * first.kept:,} (" in lines[1]
    assert "0.0000 to 0.2900" in lines[1]
    assert short_table(layers[:40]) == table(layers[:40])


def test_a_result_shows_itself_in_one_line_without_tensors(result):
    assert repr(result).startswith("PruningResult(kept 32 of 320 weights, 2 layers, ")
    assert "\n" not in repr(result) and "tensor(" not in repr(result)


def test_html_is_a_table_without_scripts_and_with_escaped_names(result):
    named = replace(result.layers[0], name="<script>alert(1)</script>")
    page = replace(result, layers=(named, result.layers[1]))._repr_html_()
    assert page.count("<tr>") == 3 and "<script" not in page and "&lt;script&gt;" in page
    assert "fewer weights" in page


def test_export_writes_the_format_of_the_extension(result, tmp_path):
    compact = result.export(tmp_path / "x.safetensors")
    loaded = lobs.load(compact.path)
    assert all(torch.equal(loaded.masks[n], m) for n, m in result.masks.items())
    assert all(torch.equal(loaded.state_dict[n], t) for n, t in result.model.state_dict().items())
    assert loaded.record["kept"] == result.kept
    half = result.export(tmp_path / "half.safetensors", values="float16")
    assert half.file_bytes < compact.file_bytes
    x = torch.randn(7, 12)
    program = result.export(tmp_path / "x.pt2", torch.randn(2, 12))
    assert torch.allclose(program.module()(x), result.model(x), atol=1e-5)
    again = torch.export.load(tmp_path / "x.pt2")
    assert torch.allclose(again.module()(x), result.model(x), atol=1e-5)


def test_export_to_onnx(result, tmp_path):
    pytest.importorskip("onnxruntime")
    done = result.export(tmp_path / "x.onnx", torch.randn(2, 12))
    assert done.path == tmp_path / "x.onnx" and done.largest_difference <= 1e-4


def test_export_refuses_other_extensions_and_a_missing_example(result, tmp_path):
    with pytest.raises(LobsError, match=r"must end in \.onnx, \.pt2 or \.safetensors"):
        result.export(tmp_path / "x.pt", torch.ones(1, 12))
    with pytest.raises(LobsError, match=r"write result\.export\('.*x\.onnx', example\)"):
        result.export(tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_accelerate_computes_the_same(result):
    x = torch.randn(5, 12)
    fast = result.accelerate(x, seconds=0.01, progress=False)
    assert isinstance(fast, Acceleration)
    assert torch.allclose(fast.model(x), result.model(x), atol=1e-4)


def test_report_writes_a_page(result, tmp_path):
    path = result.report(tmp_path / "r.html", title="My <net>", error_before=1.5, error_after=1.54)
    page = path.read_text()
    assert page.startswith("<!") and "My &lt;net&gt;" in page and "1.54" in page
    with pytest.raises(LobsError, match=r"must end in \.html: name it 'r\.html'"):
        result.report(tmp_path / "r.txt")


NETWORK = """
import torch
from torch import nn

def network():
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    return model, [torch.randn(80, 12)], lambda model: 3.5
"""


def test_a_file_that_names_its_network_is_usable_in_the_shell(result, tmp_path, monkeypatch):
    (tmp_path / "saved_mycode.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    path = result.save("x.safetensors", network="saved_mycode:network", note="kept")
    assert lobs.load(path).record["network"] == "saved_mycode:network"
    assert lobs.load(path).record["note"] == "kept"
    done = CliRunner().invoke(app, ["eval", "x.safetensors", "--trust", "--json"])
    assert done.exit_code == 0, done.output
    assert 3.5 in json.loads(done.stdout).values()


@pytest.mark.parametrize("network", ["", "a b:c", "mycode:", "a:b:c", "../x.py", 3])
def test_a_name_that_cannot_be_a_network_is_refused(result, tmp_path, network):
    with pytest.raises(LobsError, match="name the function that makes it"):
        result.save(tmp_path / "x.safetensors", network=network)
    assert not list(tmp_path.iterdir())
