"""The table of language models: its methods, its file of rows, its chart and its page."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from benchmarks import language_table
from benchmarks.baselines.block_refit import Adam
from benchmarks.blocks import Case

from lobs.layers import find_layers

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def case():
    """A tiny decoder and rows of tokens."""
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings).eval()
    rows = torch.randint(24, (24, 16))
    dense = model(input_ids=rows[16:]).logits.detach()

    def loss(small):
        with torch.no_grad():
            return float((small(input_ids=rows[16:]).logits - dense).square().mean())

    return Case(model, rows[:16], loss, 0.0, "8 rows of 16 tokens")


@pytest.mark.parametrize("target", ["4:8", pytest.param("0.5", marks=pytest.mark.slow)])
def test_every_method_keeps_the_same_count_and_ours_is_nearest(case, target):
    batches = [{"input_ids": row} for row in case.calibrate.split(4)]
    losses = {}
    for method in language_table.METHODS:
        small = language_table.pruned(case, batches, method, target, Adam(epochs=4, rate=1e-3))
        for layer in find_layers(small, skip="lm_head"):
            kept = (layer.weight != 0).float()
            assert kept.mean() == pytest.approx(0.5, abs=0.01), (method, layer.name)
            if ":" in target:
                assert (kept.view(-1, 8).sum(1) <= 4).all()
        losses[method] = case.loss(small)
    assert losses["ADMM"] < losses["magnitude"]
    assert losses[language_table.REFITTED] < losses["ADMM"]
    assert losses[language_table.OURS] < losses["ADMM"]


def given(path, **more):
    found = {"model": "stories15m", "rows": 8, "seed": 0, "epochs": 10, "rate": 2e-4}
    return argparse.Namespace(**found, numbers=path, **more)


def answer(loss, kept=0.5):
    return {"dense": 5.0, "loss": loss, "kept": kept, "tokens": 2048, "length": 256,
            "judged": "8 rows of 256 tokens", "seconds": 3.0, "peak_bytes": 10**9}  # fmt: skip


def test_rows_are_added_and_finished_ones_are_not_run_again(tmp_path, monkeypatch, capsys):
    path, ran = tmp_path / "rows.json", []

    def run(command, **_):
        ran.append(command[-2:])
        if command[-2] == "Wanda":
            return SimpleNamespace(returncode=1, stderr="x\nMemoryError: full\n", stdout="")
        text = "a note\n" + json.dumps(answer(7.0 + len(ran)))
        return SimpleNamespace(returncode=0, stdout=text, stderr="")

    monkeypatch.setattr(language_table.subprocess, "run", run)
    for _ in range(2):
        for method in ("ADMM", "Wanda", language_table.REFITTED):
            language_table.measure(given(path), method, "0.5")
    assert [method for method, _ in ran] == ["ADMM", "Wanda", language_table.REFITTED, "Wanda"]
    assert "failed: Wanda at 0.5: MemoryError: full" in capsys.readouterr().out
    assert len(language_table.read(path)) == 2
    other = given(path)
    other.rate = 1e-3  # another setting of the rival is another row
    language_table.measure(other, language_table.REFITTED, "0.5")
    assert len(language_table.read(path)) == 3


def test_the_page_gets_the_table_and_the_chart(tmp_path):
    rows = [
        {"model": "stories15m", "rows": 8, "seed": 0, "target": target, "method": method,
         **answer(loss, 0.5 if ":" in target else 1 - float(target))}
        for method, shift in (("ADMM", 1.0), ("lobs", 0.0))
        for target, loss in (("0.5", 6 + shift), ("0.7", 12 + shift), ("2:4", 8 + shift))
    ]  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table -->\nold\n<!-- end of table -->\nAfter.\n")
    language_table.write_page(rows, page)
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    assert "| lobs | 6 | 12 | 8 | 3 to 3 | 1.00 GB |" in text
    assert "| method | 50 % removed | 70 % removed | 2:4 |" in text and "Dense: 5." in text
    language_table.draw(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit, match="no row"):
        language_table.draw([], tmp_path / "none.png")
