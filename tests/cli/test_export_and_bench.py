from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import lobs
from lobs import LobsError, zoo

from .test_cli import USER_CODE, as_json, invoke, run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A LeNet-300-100 pruned by magnitude, saved as the command line saves it."""
    path = tmp_path_factory.mktemp("files") / "small.safetensors"
    as_json(
        "prune",
        "lenet300",
        "--keep",
        "3%",
        "--solver",
        "magnitude",
        "--samples",
        500,
        "--out",
        path,
    )
    return path


def test_a_compact_file_is_small_and_every_command_reads_it(small, tmp_path):
    out = tmp_path / "compact.safetensors"
    done = as_json("export", small, "--out", out)
    assert done["file_bytes"] == out.stat().st_size < 0.06 * done["others"]["dense"]
    assert (
        done["header_bytes"] + sum(t["stored_bytes"] for t in done["tensors"]) == done["file_bytes"]
    )
    assert "gzip -9" in done["others"]
    plain, compact = lobs.load(small), lobs.load(out)
    # What other budgets would have asked is for the report; a small file does without.
    assert {key: value for key, value in plain.record.items() if key != "preview"} == compact.record
    assert all(torch.equal(t, compact.state_dict[n]) for n, t in plain.state_dict.items())
    assert all(torch.equal(m, compact.masks[n]) for n, m in plain.masks.items())
    assert as_json("eval", out)["value"] == as_json("eval", small)["value"]
    assert as_json("verify", out, "--no-recompute")["holds"]
    text = invoke("export", small, "--out", out, "--values", "int8").output
    assert "every byte" in text and "gzip -9 file with zeros" in text and "int8" in text


def test_a_zoo_network_and_a_foreign_file_can_be_exported(tmp_path):
    done = as_json("export", "lenet300", "--out", tmp_path / "x.safetensors")
    assert done["file_bytes"] < 1.01 * done["others"]["dense"]
    state = zoo.trained("lenet300").state_dict()
    assert all(
        torch.equal(t, state[n])
        for n, t in lobs.load(tmp_path / "x.safetensors").state_dict.items()
    )
    save_file({"w": torch.zeros(100, 100)}, tmp_path / "foreign.safetensors")
    assert (
        as_json("export", tmp_path / "foreign.safetensors", "--out", tmp_path / "y")["file_bytes"]
        < 3000
    )


def test_wrong_requests_are_one_clear_line(small, tmp_path):
    for arguments, words in (
        (("export", small, "--format", "tar"), "--format tar is unknown"),
        (
            ("export", small, "--values", "int4", "--out", tmp_path / "x"),
            "values=.int4. is unknown",
        ),
        (("export", small, "--out", tmp_path / "none" / "x"), "there is no folder"),
    ):
        with pytest.raises(LobsError, match=words):
            invoke(*arguments)


@pytest.mark.slow
def test_onnx_and_torch_programs_from_the_shell(small, tmp_path):
    pytest.importorskip("onnxruntime")
    done = as_json("export", small, "--format", "onnx", "--out", tmp_path / "x.onnx")
    assert done["largest_difference"] < 1e-4
    as_json("export", small, "--format", "torch", "--out", tmp_path / "x.pt2")
    (tmp_path / "mycode.py").write_text(USER_CODE)
    code, _, err = run("export", "mycode:network", "--format", "onnx", cwd=tmp_path)
    assert code == 0 and (tmp_path / "mycode-network.onnx").is_file(), err


def test_bench_measures_both_and_is_never_slower(small):
    done = as_json("bench", small, "--batch", 4, "--seconds", "0.05", "--threads", 1)
    (result,) = done["batches"]
    assert result["batch"] == 4 and done["threads"] == 1
    assert {row["name"] for row in result["layers"]} >= {"fc1", "fc2", "fc3"}
    assert (
        result["speedup"]["low"] >= 1
        and result["dense"]["low"] <= result["dense"]["middle"] <= result["dense"]["high"]
    )


def test_verify_tells_which_layer_lost_what(small, tmp_path):
    saved = lobs.load(small)
    state = {n: t.clone() for n, t in saved.state_dict.items()}
    state["fc2.weight"].add_(0.5)
    lobs.save(state, tmp_path / "finetuned.safetensors")
    result = invoke("verify", small, "--weights", tmp_path / "finetuned.safetensors")
    assert result.exit_code == 1
    gone = f"{int((~saved.masks['fc2.weight']).sum()):,}"
    lost = f"{gone} removed weights are not zero (100.0% of {gone}); the largest is 0.5"
    assert f"FAIL  mask fc2.weight: {lost}" in result.output
    assert "ok    mask fc1.weight" in result.output
    assert invoke("verify", small, "--weights", small).exit_code == 0
    assert json.loads(invoke("verify", small, "--weights", small, "--json").stdout)["holds"]
