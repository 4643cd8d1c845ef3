"""Bad folders get one clear line. Nothing is written, and no code of a folder runs."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import lobs
from lobs.zoo.hub import Reading
from tests.hub.networks import sentences, written

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return written(tmp_path_factory.mktemp("good") / "big", shards=3)


@pytest.fixture
def big(good, tmp_path):
    shutil.copytree(good, tmp_path / "big")
    return tmp_path / "big"


def refused(big, *words, data=None, **how):
    out = big.parent / "small"
    with pytest.raises(lobs.LobsError) as caught:
        lobs.hub.prune(
            big, sentences() if data is None else data, keep=0.5, out=out,
            reading=how.pop("reading", Reading(samples=8, length=16)), progress=False, **how,
        )  # fmt: skip
    message = str(caught.value)
    assert "\n" not in message and message[-1] in ".)", message
    for word in words:
        assert word in message, message
    assert not out.exists()
    assert not [p.name for p in big.parent.iterdir() if p.name.startswith(".")]


def edited(path, **changes):
    found = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**found, **changes}.items() if v is not None}))


def shard(big):
    return sorted(big.glob("model-*.safetensors"))[1]


def test_folders_without_a_network(big, tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    refused(big / "config.json", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no config.json")
    (big / "config.json").write_text("{")
    refused(big, "config.json", "is no JSON")
    (big / "config.json").write_text("[1]")
    refused(big, "config.json", "is no mapping")


def test_settings_that_fit_no_network(big):
    edited(big / "config.json", architectures=None)
    refused(big, "names no architecture")
    edited(big / "config.json", architectures=["NobodyForCausalLM"])
    refused(big, "NobodyForCausalLM", "does not have")
    edited(big / "config.json", architectures=["torch"])
    refused(big, "'torch'")
    edited(big / "config.json", architectures=["LlamaForCausalLM"], model_type="nobody")
    refused(big, "cannot be read", "nobody")
    edited(big / "config.json", model_type="llama", quantization_config={"quant_method": "x"})
    refused(big, "quantised weights")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_folder_is_refused_and_never_runs(big, file):
    code = f"open({str(big / 'ran')!r}, 'w').write('x')\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py"):
        (big / name).write_text(code)
    auto = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edited(big / file, auto_map=auto)
    refused(big, file, "auto_map", "lobs.prune")
    assert not (big / "ran").exists()


def test_weights_that_are_damaged_or_missing(big):
    whole = shard(big).read_bytes()
    shard(big).write_bytes(whole[: len(whole) // 2])
    refused(big, shard(big).name, "is no whole safetensors file")
    name = shard(big).name
    shard(big).unlink()
    refused(big, name, "not in the folder")
    (big / name).write_bytes(whole)
    index = big / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    evil = {**places, "x": "../evil.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": evil}))
    refused(big, "../evil.safetensors")
    lost = next(n for n, file in places.items() if file == name and n.endswith("weight"))
    state = {n: t for n, t in load_file(big / name).items() if n != lost}
    save_file(state, big / name, metadata={"format": "pt"})
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    refused(big, lost, "but it does not")
    others = {n: f for n, f in places.items() if n != lost}
    index.write_text(json.dumps({"metadata": {}, "weight_map": others}))
    refused(big, "holds no tensor", lost)
    for file in (*big.glob("*.safetensors"), index):
        file.unlink()
    (big / "pytorch_model.bin").write_bytes(b"x")
    refused(big, "neither 'model.safetensors' nor")


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float16])
def test_weights_of_a_wrong_type(big, kind):
    state = load_file(shard(big))
    name = next(n for n, t in state.items() if t.dim() == 2)
    state[name] = state[name].to(kind)
    save_file(state, shard(big), metadata={"format": "pt"})
    refused(big, name, str(kind))


def test_weights_of_another_shape(big):
    edited(big / "config.json", intermediate_size=56)
    refused(big, "mlp.down_proj.weight", "(32, 48)", "(32, 56)")


def test_data_that_do_not_fit(big, tmp_path):
    refused(big, "there is no data", data=tmp_path / "nothing.txt")
    (tmp_path / "short.txt").write_text("the cat runs.")
    refused(big, "fewer than one row", data=tmp_path / "short.txt")
    refused(big, "data is empty", data=[])
    refused(big, "data is a int", data=3)
    refused(big, "has 64 positions", reading=Reading(length=65))
    with pytest.raises(lobs.LobsError, match="length is 1"):
        Reading(length=1)
    (big / "tokenizer.json").unlink()
    refused(big, "holds no tokenizer", ".npy")


def test_places_that_cannot_be_written(big, tmp_path):
    (tmp_path / "small").write_text("x")
    with pytest.raises(lobs.LobsError, match="a file: give a new folder"):
        lobs.hub.prune(big, sentences(), keep=0.5, out=tmp_path / "small")
    for how in ({}, {"inputs": "pruned", "refit": "layers"}):
        with pytest.raises(lobs.LobsError, match=r"the source itself|not empty"):
            lobs.hub.prune(
                big, sentences(), keep=0.5, out=big, progress=False,
                reading=Reading(samples=8, length=16), **how,
            )  # fmt: skip
    assert (big / "tokenizer.json").is_file()
    for out in (big / "small", big / "a" / "b"):
        with pytest.raises(lobs.LobsError, match="which lies in the source"):
            lobs.hub.prune(big, sentences(), keep=0.5, out=out, progress=False)
        assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    for how in ({}, {"inputs": "pruned", "refit": "layers"}):
        with pytest.raises(lobs.LobsError, match=r"holds 'mine.txt'|not empty"):
            lobs.hub.prune(
                big, sentences(), keep=0.5, out=tmp_path / "full", progress=False,
                reading=Reading(samples=8, length=16), **how,
            )  # fmt: skip
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_data_files_that_hold_nothing_or_something_else(big, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    refused(big, "'empty.txt' holds no text", data=tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text(" \n\n")
    refused(big, "'blank.txt' holds no text", data=tmp_path / "blank.txt")
    (tmp_path / "lines.jsonl").write_text('{"text": "the cat", "n": 1}\n')
    how = {"data": tmp_path / "lines.jsonl"}
    refused(big, "body", "text", reading=Reading(field="body", length=16), **how)
    refused(big, "n", reading=Reading(field="n", length=16), **how)
    (tmp_path / "lines.jsonl").write_text("")
    refused(big, "lines.jsonl", **how)
    (tmp_path / "nothing").mkdir()
    refused(big, "nothing", data=tmp_path / "nothing")


def test_without_transformers_one_line_says_how_to_get_it(big, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(big, "pip install 'lobs[hub]'")


def test_a_name_needs_weights_and_a_folder_none(big, tmp_path):
    with pytest.raises(lobs.LobsError, match="name without weights"):
        lobs.hub.prune("timm:resnet18", tmp_path, keep=0.5, out=tmp_path / "small")
    refused(big, "weights goes with a name", weights=tmp_path / "x.safetensors")
    with pytest.raises(lobs.LobsError, match="timm has no network 'nobody'"):
        lobs.hub.prune(
            "timm:nobody", tmp_path, keep=0.5, out=tmp_path / "small", weights=tmp_path / "x"
        )
