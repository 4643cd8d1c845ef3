"""Prune a Hugging Face text encoder, fine-tune it with the Trainer, and keep the zeros.

Batches are mappings of keyword arguments. The weights are random, so that the example downloads
nothing: replace `encoder()` by `from_pretrained` and the tokens by yours. It needs transformers:
pip install 'lobs[trainers]'

python examples/text_encoder.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lobs


def encoder() -> BertForSequenceClassification:
    """Return a small BERT. Yours comes from `from_pretrained(...)`."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(config).eval()


def sentences(count: int) -> dict[str, torch.Tensor]:
    """Return stand-ins for tokenised sentences of several lengths."""
    tokens = torch.randint(1, 1000, (count, 24))
    mask = torch.arange(24) < torch.randint(8, 25, (count, 1))
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}


def main() -> None:
    """Prune the encoder to half of its weights, compare, fine-tune, count the zeros."""
    model = encoder()
    batches = [sentences(32) for _ in range(8)]
    options = {"keep": 0.5, "layers": "bert.encoder.*", "progress": False}
    result = lobs.prune(model, batches, solver="greedy", **options)
    magnitude = lobs.prune(model, batches, solver="magnitude", **options)
    held_out = sentences(64)

    def moved(pruned: torch.nn.Module) -> float:
        with torch.no_grad():
            dense = model.bert(**held_out).last_hidden_state
            return float((pruned.bert(**held_out).last_hidden_state - dense).norm() / dense.norm())

    exact, naive = moved(result.model), moved(magnitude.model)
    print(f"hidden states move by {exact:.1%}; by {naive:.1%} with magnitude pruning")
    assert result.kept_fraction == 0.5
    assert exact < naive

    labelled = sentences(64)
    data = [
        {**{k: v[i] for k, v in labelled.items()}, "labels": torch.tensor(i % 2)} for i in range(64)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=8,
            weight_decay=0.1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = lobs.training.trainer_callback(result.masks)
        Trainer(result.model, settings, train_dataset=data, callbacks=[callback]).train()
    revived = lobs.training.apply_masks(result.model, result.masks)
    print(
        f"after fine-tuning {sum(revived.values())} of {result.total - result.kept:,} zeros were "
        "lost"
    )
    assert not any(revived.values())


if __name__ == "__main__":
    main()
