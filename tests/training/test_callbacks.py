from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError

from .test_hold import OPTIMIZERS, fit, network, random_masks, revived


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = network()


def test_a_lightning_style_loop_without_lightning(monkeypatch):
    for module in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    wrapped = Wrapped()
    masks = random_masks(wrapped.model)
    callback = lobs.training.lightning_callback(masks, "model")
    optimizer = OPTIMIZERS["adam"](wrapped.parameters())
    callback.setup(None, wrapped, "fit")
    callback.on_fit_start(None, wrapped)
    callback.on_train_start(None, wrapped)
    callback.on_train_epoch_start(None, wrapped)
    fit(wrapped.model, optimizer)
    callback.on_fit_end(None, wrapped)
    assert revived(wrapped.model, masks) == 0
    fit(wrapped.model, optimizer, 1)
    assert revived(wrapped.model, masks) > 0  # the hooks are gone
    callback.on_fit_start(None, wrapped)
    callback.on_exception(None, wrapped, ValueError())
    fit(wrapped.model, optimizer, 1)
    assert revived(wrapped.model, masks) > 0
    with pytest.raises(AttributeError):
        _ = callback.nonsense


def test_a_trainer_style_loop_without_transformers(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    model = network()
    masks = random_masks(model)
    callback = lobs.training.trainer_callback(masks)
    callback.on_init_end(None, None, None)
    callback.on_train_begin(None, None, None, model=model, optimizer=None)
    fit(model, OPTIMIZERS["adam"](model.parameters()))
    callback.on_train_end(None, None, None, model=model)
    assert revived(model, masks) == 0 and callback.held is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_real_lightning_trainer(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return OPTIMIZERS["adamw-foreach"](self.parameters())

    module = Module()
    masks = random_masks(module.model)
    lobs.training.apply_masks(module.model, masks)
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 5, 5), torch.randint(2, (32,)))
    for callbacks in ([lobs.training.lightning_callback(masks, "model")], []):
        trainer = lightning.Trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, 4))
        assert (revived(module.model, masks) == 0) == bool(callbacks)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_real_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = transformers.BertForSequenceClassification(config)
    masks = {
        n: torch.rand_like(p) < 0.3
        for n, p in model.named_parameters()
        if "encoder" in n and p.dim() > 1
    }
    data = [
        {"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)
    ]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    for callbacks in ([lobs.training.trainer_callback(masks)], []):
        transformers.Trainer(model, settings, train_dataset=data, callbacks=callbacks).train()
        assert (revived(model, masks) == 0) == bool(callbacks)


def test_a_lora_merge_keeps_the_mask_and_says_what_it_lost():
    mask = torch.rand(12, 20) < 0.3
    weight = torch.randn(12, 20).masked_fill(~mask, 0)
    down, up = torch.randn(3, 20), torch.randn(12, 3)
    merged, lost = lobs.training.merge_lora(weight, down, up, mask, scale=0.5)
    update = 0.5 * up @ down
    assert not merged[~mask].any() and torch.allclose(merged[mask], (weight + update)[mask])
    assert lost == pytest.approx(
        float(update[~mask].square().sum() / update.square().sum()), rel=1e-5
    )
    assert lobs.training.merge_lora(weight, down * 0, up, mask)[1] == 0
    with pytest.raises(LobsError, match="do not fit together"):
        lobs.training.merge_lora(weight, down[:, :5], up, mask)
    with pytest.raises(LobsError, match="has no merge_and_unload"):
        lobs.training.merge_adapters(nn.Linear(2, 2), {})


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_peft_merge_keeps_the_mask():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    masks = {"0.weight": torch.rand(16, 20) < 0.3}
    lobs.training.apply_masks(model, masks)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    )
    merged, refilled = lobs.training.merge_adapters(adapted, masks)
    assert refilled["0.weight"] > 100 and revived(merged, masks) == 0
    assert type(merged[0]) is nn.Linear
