"""Folder → folder → `from_pretrained`, for decoders, encoders, seq2seq, vision and speech."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lobs
from lobs.layers.mixtures import mixtures
from lobs.storage.shards import Shards
from lobs.zoo.hub import Reading
from tests.hub.networks import (
    IN_THE_DEFAULT_SUITE,
    NETWORKS,
    data_for,
    sentences,
    timm_folder,
    with_tokenizer,
    written,
)
from tests.hub.shell import lobs_command

transformers = pytest.importorskip("transformers")
EACH = [
    name if name in IN_THE_DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.slow)
    for name in NETWORKS
]
FEW = Reading(samples=24, length=16)


def pruned(big, data, out, keep=0.5, **how):
    how = {"reading": FEW, "progress": False, "refit": "layers", **how}
    return lobs.hub.prune(big, data, keep=keep, out=out, **how)


def tensors(folder):
    shards = Shards(folder)
    return shards.read(shards.entries)


@pytest.mark.parametrize("architecture", EACH)
def test_a_folder_becomes_a_folder_that_loads(architecture, tmp_path):
    big = written(tmp_path / "big", architecture)
    data = data_for(architecture, tmp_path)
    result = pruned(big, data, tmp_path / "small")
    assert abs(result.kept - result.total / 2) <= len(result.layers) and result.layers
    network = getattr(transformers, architecture)
    dense, small = (
        network.from_pretrained(folder, dtype="auto") for folder in (big, tmp_path / "small")
    )
    before, after = tensors(big), tensors(tmp_path / "small")
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    loaded = small.state_dict()
    names = json.loads((tmp_path / "small" / "lobs.json").read_text())["names"]
    shared = [n for n in after if names.get(n, n) in loaded]
    assert len(shared) > len(after) // 3
    assert all(torch.equal(loaded[names.get(name, name)], after[name]) for name in shared)
    masks, rows = lobs.hub.masks(tmp_path / "small"), {x.name: x for x in result.layers}
    for name, row in rows.items():
        weight = next(p for p in row.parameters if p.endswith("weight"))
        mask = masks[weight]
        if len(row.parameters) < 3 and row.parameters[weight][1] == len(mask):
            assert int(mask.sum()) == row.kept, name
        assert not loaded[weight][~mask].any()
    changed = {n for n, t in dense.state_dict().items() if not torch.equal(t, loaded[n])}
    assert changed
    heads = small.get_output_embeddings()
    assert heads is None or not any("lm_head" in name for name in masks)
    assert all(finding.holds for finding in lobs.hub.verify(tmp_path / "small"))
    again = tmp_path / "again"
    small.save_pretrained(again)
    once_more = tensors(again)
    assert all(torch.equal(t, once_more[name]) for name, t in after.items() if name in once_more)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_type_shards_and_every_other_file_stay(tmp_path, kind):
    big = written(tmp_path / "big", kind=kind, shards=3)
    (big / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\nMine.")
    (big / "1_Pooling").mkdir()
    (big / "1_Pooling" / "config.json").write_text("{}")
    result = pruned(big, sentences(), tmp_path / "small", keep="30%")
    assert {t.dtype for t in tensors(tmp_path / "small").values()} == {kind}
    assert [round(0.3 * x.total + 1e-9) for x in result.layers] == [x.kept for x in result.layers]
    there = {p.name for p in (tmp_path / "small").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "config.json", "1_Pooling"} <= there
    card = (tmp_path / "small" / "README.md").read_text()
    assert "license: mit" in card and "| Perplexity |" in card and "seed 0" in card
    assert f"{result.kept:,} of {result.total:,}" in card
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert model.dtype == kind
    assert result.settings["blocks"] == "read one by one"


def test_embeddings_and_tied_heads_stay_and_blocks_are_refitted(tmp_path):
    big = written(tmp_path / "big", tie_word_embeddings=True)
    result = lobs.hub.prune(
        big, sentences(), keep=0.5, out=tmp_path / "small", reading=FEW, progress=False
    )
    assert result.settings["refit"] == "blocks" and result.after["perplexity"] > 1
    before, after = tensors(big), tensors(tmp_path / "small")
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert "lm_head.weight" not in after and "lm_head" in result.dense
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("way", ["blocks", "memory"])
def test_patterns_and_structures_go_both_ways(tmp_path, way):
    big = written(tmp_path / "big")
    how = {"refit": "layers", **({} if way == "blocks" else {"inputs": "pruned"})}
    for number, target in enumerate((lobs.NByM(2, 4), lobs.Structured(0.5))):
        out = tmp_path / f"small{number}"
        result = lobs.hub.prune(
            big, sentences(), target, out=out, reading=FEW, progress=False, measure=False, **how
        )
        one_by_one = way == "blocks" and number == 0  # units leave several layers at once
        assert result.settings["blocks"] == ("read one by one" if one_by_one else "in memory")
        assert all(finding.holds for finding in lobs.hub.verify(out))
        weight = tensors(out)["model.layers.0.mlp.up_proj.weight"]
        if number == 0:
            assert ((weight.view(-1, 4) != 0).sum(dim=1) <= 2).all()
        else:
            down = tensors(out)["model.layers.0.mlp.down_proj.weight"]
            gone = (weight == 0).all(dim=1)
            assert gone.sum() == len(gone) // 2 and torch.equal(gone, (down == 0).all(dim=0))


def test_both_ways_give_the_same_bits(tmp_path):
    big = written(tmp_path / "big")
    first = pruned(big, sentences(), tmp_path / "one", measure=False)
    names = [layer.name for layer in first.layers]
    model = transformers.LlamaForCausalLM.from_pretrained(big).eval()
    model.config.use_cache = False
    from lobs.zoo.hub.rows import prepare
    from lobs.zoo.hub.source import open_source

    batches = prepare(open_source(big), sentences(), FEW).calibrate
    second = lobs.prune(
        model, batches, lobs.Sparsity(0.5, "layer"), refit="layers", layers=names, progress=False
    )
    for name, tensor in tensors(tmp_path / "one").items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_masks_are_in_the_headers_and_damage_is_found(tmp_path):
    big = written(tmp_path / "big")
    pruned(big, sentences(), tmp_path / "small", measure=False)
    shards = Shards(tmp_path / "small")
    headers = {}
    for file in shards.files:
        with safe_open(tmp_path / "small" / file, "pt") as opened:
            headers |= opened.metadata()
            assert opened.metadata()["format"] == "pt"
    assert "lobs.masks" in headers
    from safetensors.torch import save_file

    file = shards.entries["model.layers.0.mlp.up_proj.weight"].file
    path = tmp_path / "small" / file
    with safe_open(path, "pt") as opened:
        header = opened.metadata()
    state = load_file(path)
    weight = state["model.layers.0.mlp.up_proj.weight"]
    weight[weight == 0] = 1.0
    save_file(state, path, metadata=header)
    with pytest.raises(lobs.LobsError, match="masks do not fit"):
        lobs.hub.verify(tmp_path / "small")
    state["model.layers.0.mlp.up_proj.weight"][:] = 0
    save_file(state, path, metadata={"format": "pt"})
    wrong = [f.check for f in lobs.hub.verify(tmp_path / "small") if not f.holds]
    assert f"file {file}" in wrong and any(check.startswith("masks ") for check in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_timm_folder(tmp_path, name):
    timm = pytest.importorskip("timm")
    more = {"img_size": 32} if name == "test_vit" else {}
    big, model = timm_folder(tmp_path / "big", name, **more)
    images = np.random.default_rng(0).integers(0, 255, (24, 3, 32, 32)).astype(np.uint8)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "x.labels.npy", np.arange(24) % 4)
    result = pruned(big, tmp_path / "x.npy", tmp_path / "small")
    assert abs(result.kept - result.total / 2) <= len(result.layers)
    scope = "network" if name == "test_resnet" else "layer"  # convolutions share a budget
    assert f"scope='{scope}'" in result.settings["target"]
    assert {"accuracy", "agreement"} <= result.after.keys()
    small = timm.create_model(f"local-dir:{tmp_path / 'small'}", pretrained=True, **more)
    after = tensors(tmp_path / "small")
    assert all(torch.equal(t, after[n]) for n, t in small.state_dict().items())
    assert all(finding.holds for finding in lobs.hub.verify(tmp_path / "small"))
    assert model.state_dict().keys() == after.keys()


@pytest.mark.slow
def test_a_timm_name_with_weights(tmp_path):
    timm = pytest.importorskip("timm")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((16, 3, 160, 160)))
    model = timm.create_model("test_vit", pretrained=False, num_classes=4)
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "w.safetensors")
    result = pruned(
        "timm:test_vit",
        tmp_path / "x.npy",
        tmp_path / "small",
        weights=tmp_path / "w.safetensors",
        measure=False,
        reading=Reading(samples=8),
    )
    assert abs(result.kept - result.total / 2) <= len(result.layers)
    timm.create_model(f"local-dir:{tmp_path / 'small'}", pretrained=True)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    from lobs.pruning import folder_walk

    big = written(tmp_path / "big")
    whole = pruned(big, sentences(), tmp_path / "whole", measure=False)
    write, calls = folder_walk.write_shard, []

    class Killed(BaseException):
        pass

    def dying(*given):
        calls.append(given)
        if len(calls) == 2:
            raise Killed
        write(*given)

    monkeypatch.setattr(folder_walk, "write_shard", dying)
    with pytest.raises(Killed):
        pruned(big, sentences(), tmp_path / "small", measure=False)
    assert not (tmp_path / "small" / "model.safetensors.index.json").exists()
    with pytest.raises(OSError, match="no file"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    monkeypatch.setattr(folder_walk, "write_shard", write)
    pruned(big, sentences(), tmp_path / "small", measure=False)
    one, other = tensors(tmp_path / "small"), tensors(whole.out)
    assert all(torch.equal(t, other[name]) for name, t in one.items())


def test_the_record_says_where_the_data_came_from(tmp_path):
    big = written(tmp_path / "big")
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"text": t, "n": 1}) for t in sentences()))
    result = pruned(big, path, tmp_path / "small", reading=Reading(samples=20, length=32, seed=7))
    record = json.loads((tmp_path / "small" / "lobs.json").read_text())
    assert record["data"] == dict(result.data) and record["kept"] == result.kept
    assert result.data["tokens"] == 20 * 32 and result.data["seed"] == 7
    assert result.data["length"] == 32 and result.data["data"] == "lines.jsonl"
    assert (
        any("Few calibration data" in note for note in result.notes)
        or result.data["tokens"] > 8 * 48
    )
    assert any("nats on held-out samples" in note for note in result.notes)
    assert with_tokenizer(tmp_path / "tokens").is_dir()


def test_an_encoder_decoder_is_in_memory_and_says_so(tmp_path):
    big = written(tmp_path / "big", "T5ForConditionalGeneration")
    result = pruned(big, sentences(), tmp_path / "small", measure=False)
    assert result.settings["blocks"] == "in memory"
    assert any("an encoder and a decoder are two rows" in note for note in result.notes)
    assert "two rows of blocks" in result.summary()


def test_a_folder_that_stores_experts_apart_is_verified(tmp_path):
    # transformers holds the experts of a layer in one tensor and stores one for each of them.
    big = written(tmp_path / "big", "MixtralForCausalLM")
    result = pruned(big, sentences(), tmp_path / "small", measure=False)
    findings = lobs.hub.verify(tmp_path / "small")
    assert all(finding.holds for finding in findings), findings
    assert any("joined tensors" in finding.check for finding in findings)
    assert any("experts" in layer.name for layer in result.layers)
    record = json.loads((tmp_path / "small" / "lobs.json").read_text())
    record["layers"] = [{**row, "kept": row["kept"] + 1} for row in record["layers"]]
    (tmp_path / "small" / "lobs.json").write_text(json.dumps(record))
    broken = [finding.check for finding in lobs.hub.verify(tmp_path / "small") if not finding.holds]
    assert any("joined tensors" in name for name in broken)


def test_experts_leave_a_folder_from_the_shell(tmp_path, capsys):
    big = written(tmp_path / "big", "MixtralForCausalLM")
    text = data_for("MixtralForCausalLM", tmp_path)
    small, how = tmp_path / "small", ["--samples", 32, "--length", 16, "--json"]
    said = lobs_command(
        "prune", big, "--structured", "experts", "--keep", "75%", "--data", text, *how,
        "--out", small, capsys=capsys,
    )  # fmt: skip
    record = json.loads(said)
    assert record["settings"]["experts"]["before"] == 4
    assert not any("experts" in name for name in record["dense"])
    model = transformers.AutoModelForCausalLM.from_pretrained(small)
    assert [mixture.size for mixture in mixtures(model)] == [3, 3]
    assert model.config.num_local_experts == 3
    assert not lobs.hub.masks(small)  # nothing that is left is zero
    findings = lobs.hub.verify(small)
    assert all(finding.holds for finding in findings), findings
    assert record["after"]["perplexity"] > 0
    said, card = "Experts: 4 → 3 in each of 2 mixtures.", (small / "README.md").read_text()
    assert said in record["notes"] and said in card and "Removed weights are zeros" not in card
