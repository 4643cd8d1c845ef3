"""After pruning: training on, measuring, exporting, generating."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import lobs
from lobs.zoo.hub import Reading
from tests.hub.networks import data_for, sentences, written

transformers = pytest.importorskip("transformers")
FEW = Reading(samples=16, length=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder's folder, dense and pruned, and a text."""
    home = tmp_path_factory.mktemp("decoder")
    big = written(home / "big")
    (home / "text.txt").write_text("\n".join(sentences(80, seed=1)))
    lobs.hub.prune(
        big, sentences(), keep=0.5, out=home / "small", reading=FEW, progress=False,
        refit="layers",
    )  # fmt: skip
    return big, home / "small", home / "text.txt"


def loaded(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def zeros_hold(model, masks):
    return all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())


def test_perplexity_is_that_of_the_definition(folders):
    big, _, text = folders
    found = lobs.hub.evaluate(big, text, reading=Reading(length=16))
    from lobs.zoo.hub.rows import prepare
    from lobs.zoo.hub.source import open_source

    rows = prepare(open_source(big), text, Reading(length=16), judge=True).held_out
    ids = torch.cat([batch["input_ids"] for batch in rows])
    loss = loaded(big)(input_ids=ids, labels=ids).loss.detach()
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)
    assert found["tokens"] == ids[:, 1:].numel() and found["length"] == 16


def test_a_comparison_is_that_of_the_definition(folders):
    big, small, text = folders
    same = lobs.hub.compare(big, big, text, reading=FEW)
    assert same["agreement"] == 1 and same["kl"] == pytest.approx(0, abs=1e-9)
    assert all(row["dense"] == row["small"] for row in same["generations"])
    found = lobs.hub.compare(small, big, text, reading=FEW)
    from lobs.zoo.hub.rows import prepare
    from lobs.zoo.hub.source import open_source

    rows = prepare(open_source(big), text, FEW, judge=True).held_out
    ids = torch.cat([batch["input_ids"] for batch in rows])
    p, q = (loaded(f)(input_ids=ids).logits[:, :-1].detach().log_softmax(-1) for f in (big, small))
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert found["agreement"] == pytest.approx(float(agreement), abs=1e-6)
    assert len(found["generations"]) == 5
    assert found["generations"][0].keys() == {"prompt", "dense", "small"}
    asked = lobs.hub.compare(small, big, text, reading=FEW, prompts=["the cat"])
    assert [row["prompt"] for row in asked["generations"]] == ["the cat"]
    json.dumps(found)


def test_encoders_are_judged_by_their_cosine_and_classifiers_by_accuracy(tmp_path):
    big = written(tmp_path / "big", "BertModel")
    texts = sentences()
    lobs.hub.prune(big, texts, keep=0.5, out=tmp_path / "small", reading=FEW, progress=False,
                   refit="layers", measure=False)  # fmt: skip
    assert 0.5 < lobs.hub.evaluate(tmp_path / "small", texts, reading=FEW)["cosine"] < 1
    own = lobs.hub.evaluate(tmp_path / "small", texts, dense=tmp_path / "small", reading=FEW)
    assert own["cosine"] == pytest.approx(1)
    other = written(tmp_path / "labels", "RobertaForSequenceClassification")
    lines = [json.dumps({"text": t, "label": i % 3}) for i, t in enumerate(texts)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    found = lobs.hub.evaluate(other, tmp_path / "x.jsonl")
    model = transformers.RobertaForSequenceClassification.from_pretrained(other).eval()
    from lobs.zoo.hub.source import open_source
    from lobs.zoo.hub.tokens import tokenizer_of

    tokenizer = tokenizer_of(open_source(other))
    right = 0
    for i, text in enumerate(texts):  # alone, so without padding
        batch = tokenizer(text, return_tensors="pt")
        batch.pop("token_type_ids", None)
        right += int(model(**batch).logits.argmax()) == i % 3
    assert found["accuracy"] == pytest.approx(right / len(texts), abs=0.011)
    with pytest.raises(lobs.LobsError, match="--dense FOLDER"):
        lobs.hub.evaluate(other, texts)


def test_the_shell_prunes_measures_compares_and_verifies(folders, tmp_path, monkeypatch, capsys):
    from tests.hub.shell import lobs_command

    big, _, text = folders
    monkeypatch.chdir(tmp_path)
    words = ["--data", text, "--length", "16", "--samples", "16"]
    done = lobs_command("prune", big, "--keep", "50%", "--refit", "layers", *words, "--json",
                        "--out", "small/", capsys=capsys)  # fmt: skip
    record = json.loads(done)
    assert 2 * record["kept"] == record["total"] and record["after"]["perplexity"] > 0
    assert "everything holds" in lobs_command("verify", "small/", capsys=capsys)
    found = json.loads(lobs_command("eval", "small/", *words, "--json", capsys=capsys))
    assert found["perplexity"] > 0 and found["length"] == 16
    both = json.loads(lobs_command("compare", "small/", big, *words, "--json", capsys=capsys))
    assert 0 <= both["agreement"] <= 1 and len(both["generations"]) == 5
    shown = lobs_command("compare", "small/", big, *words, capsys=capsys)
    assert "perplexity:" in shown and "KL(dense ‖ small)" in shown and "prompt:" in shown
    lobs_command("prune", big, "--pattern", "2:4", "--refit", "layers", *words, capsys=capsys)
    assert (tmp_path / "big-2of4" / "model.safetensors.index.json").is_file()
    for line in (
        ["prune", big, "--keep", "50%"],
        ["eval", "small/"],
        ["prune", big, "--keep", "50%", *words, "--dry-run"],
        ["prune", big, "--speedup", "2x", *words],
        ["prune", big, "--drop", "1%", *words],
        ["prune", "lenet300", "--keep", "50%", "--data", text],
    ):
        with pytest.raises(lobs.LobsError) as caught:
            lobs_command(*line, capsys=capsys)
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("default")
def test_lora_updates_stay_off_removed_weights_and_merge_without_loss(folders):
    peft = pytest.importorskip("peft")
    _, small, _ = folders
    masks, model = lobs.hub.masks(small), loaded(small)
    hold = lobs.training.hold_adapters
    with pytest.raises(lobs.LobsError, match="no adapter lies"), hold(model, masks):
        pass
    wet = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    other = peft.get_peft_model(loaded(small), wet)
    with pytest.raises(lobs.LobsError, match="dropout"), hold(other, masks):
        pass
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, settings)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    ids = torch.randint(4, 20, (4, 16))
    losses = []
    with hold(adapted, masks):
        for _ in range(8):
            loss = adapted(input_ids=ids, labels=ids).loss
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        held = adapted(input_ids=ids).logits.detach()
    assert losses[-1] < losses[0]
    free = adapted(input_ids=ids).logits.detach()
    assert not torch.allclose(held, free, atol=1e-4)  # the masking is gone with the block
    merged, refilled = lobs.training.merge_adapters(adapted, masks)
    assert zeros_hold(merged, masks) and sum(refilled.values()) > 0
    torch.testing.assert_close(merged(input_ids=ids).logits.detach(), held, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_trainer_keeps_the_zeros_of_a_folder(folders, tmp_path):
    pytest.importorskip("accelerate")
    _, small, _ = folders
    masks, model = lobs.hub.masks(small), loaded(small)
    ids = torch.randint(4, 20, (16, 12))
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, weight_decay=0.1,
        learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    before = {n: p.clone() for n, p in model.named_parameters()}
    callbacks = [lobs.training.trainer_callback(masks)]
    transformers.Trainer(model, settings, train_dataset=data, callbacks=callbacks).train()
    assert zeros_hold(model, masks)
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_an_encoder_goes_to_onnxruntime(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    big = written(tmp_path / "big", "BertModel")
    lobs.hub.prune(big, data_for("BertModel", tmp_path), keep=0.5, out=tmp_path / "small",
                   reading=FEW, progress=False, refit="layers", measure=False)  # fmt: skip
    model = transformers.BertModel.from_pretrained(
        tmp_path / "small", add_pooling_layer=False, attn_implementation="eager"
    ).eval()
    ids = torch.randint(4, 20, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    file = lobs.export_onnx(model, tmp_path / "encoder.onnx", batch, dynamic_batch=False)
    assert file.largest_difference < 1e-4
    import onnx

    stored = onnx.load(tmp_path / "encoder.onnx")
    weights = [onnx.numpy_helper.to_array(t) for t in stored.graph.initializer]
    dense = np.mean([(w != 0).mean() for w in weights if w.shape in ((32, 48), (48, 32))])
    assert dense == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_a_pruned_decoder_generates_the_same_text_when_accelerated(folders):
    _, small, _ = folders
    model = loaded(small)
    ids = torch.randint(4, 20, (1, 6))
    done = lobs.accelerate(model, {"input_ids": ids})
    network = getattr(done, "model", done)
    plain, fast = (
        m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        for m in (model, network)
    )
    assert torch.equal(plain, fast)
