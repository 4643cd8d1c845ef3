"""Tiny random networks in folders, as transformers and timm write them."""

# ruff: noqa: C408 - settings read best as keywords
from __future__ import annotations

import json

import numpy as np
import torch

WORDS = "the a small large red blue cat dog bird sun moon tree river runs sleeps sees likes finds"
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
VOCABULARY = len(SPECIAL) + len(WORDS.split()) + 1
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def sentences(count=200, seed=0):
    """Sentences of different lengths."""
    g, words = torch.Generator().manual_seed(seed), WORDS.split()
    made = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (1,), generator=g))
        chosen = torch.randint(len(words), (length,), generator=g).tolist()
        made.append(" ".join(words[i] for i in chosen) + ".")
    return made


def with_tokenizer(folder):
    """Add a tokenizer of whole words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    listed = [*SPECIAL, *WORDS.split(), "."]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(listed)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
    ).save_pretrained(folder)
    return folder


def _settings(name, more):
    import transformers

    return getattr(transformers, f"{name}Config")(**more)


def _t5():
    return dict(TEXT, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                decoder_start_token_id=0)  # fmt: skip


def _bart():
    return dict(TEXT, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                max_position_embeddings=64, decoder_start_token_id=2,
                forced_eos_token_id=3)  # fmt: skip


def _decoder(**more):
    return dict(TEXT, **SMALL, max_position_embeddings=64, **more)


def _gpt2():
    return dict(TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64)


def _vision(**more):
    return dict(SMALL, image_size=16, patch_size=4, num_labels=3, **more)


def _speech(**more):
    return dict(SMALL, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 8),
                num_feat_extract_layers=2, num_conv_pos_embeddings=8,
                num_conv_pos_embedding_groups=2, vocab_size=12, pad_token_id=0, **more)  # fmt: skip


def _whisper():
    return dict(vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2,
                decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16,
                max_target_positions=32, pad_token_id=0, bos_token_id=2, eos_token_id=3,
                decoder_start_token_id=2, suppress_tokens=None,
                begin_suppress_tokens=None)  # fmt: skip


# Architecture: (settings' class, its arguments, kind of data)
NETWORKS = {
    "LlamaForCausalLM": ("Llama", lambda: _decoder(num_key_value_heads=2), "text"),
    "Qwen2ForCausalLM": (
        "Qwen2", lambda: _decoder(num_key_value_heads=2, tie_word_embeddings=True), "text",
    ),
    "MistralForCausalLM": ("Mistral", lambda: _decoder(num_key_value_heads=2), "text"),
    "Gemma2ForCausalLM": (
        "Gemma2", lambda: _decoder(num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8),
        "text",
    ),
    "Phi3ForCausalLM": ("Phi3", lambda: _decoder(num_key_value_heads=2), "text"),
    "GPT2LMHeadModel": ("GPT2", _gpt2, "text"),
    "GPTNeoXForCausalLM": ("GPTNeoX", _decoder, "text"),
    "OPTForCausalLM": (
        "OPT",
        lambda: dict(TEXT, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                     max_position_embeddings=64, word_embed_proj_dim=32),
        "text",
    ),
    "BertModel": ("Bert", _decoder, "text"),
    "BertForMaskedLM": ("Bert", _decoder, "text"),
    "RobertaForSequenceClassification": ("Roberta", lambda: _decoder(num_labels=3), "text"),
    "DistilBertModel": (
        "DistilBert",
        lambda: dict(vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4,
                     max_position_embeddings=64, pad_token_id=0),
        "text",
    ),
    "ElectraModel": ("Electra", lambda: _decoder(embedding_size=32), "text"),
    "T5ForConditionalGeneration": ("T5", _t5, "text"),
    "BartForConditionalGeneration": ("Bart", _bart, "text"),
    "ViTForImageClassification": ("ViT", _vision, "images"),
    "DeiTModel": ("DeiT", _vision, "images"),
    "Dinov2Model": ("Dinov2", lambda: _vision(mlp_ratio=2), "images"),
    "ConvNextForImageClassification": (
        "ConvNext",
        lambda: dict(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2,
                     image_size=16, num_labels=3),
        "images",
    ),
    "ResNetForImageClassification": (
        "ResNet",
        lambda: dict(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=3,
                     layer_type="basic"),
        "images",
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2", _speech, "sound"),
    "HubertModel": ("Hubert", _speech, "sound"),
    "WhisperForConditionalGeneration": ("Whisper", _whisper, "features"),
}  # fmt: skip
MIXTURES = {
    "MixtralForCausalLM": (
        "Mixtral", lambda: _decoder(num_key_value_heads=2, num_local_experts=4), "text",
    ),
}  # fmt: skip
IN_THE_DEFAULT_SUITE = ("LlamaForCausalLM", "BertModel", "ViTForImageClassification")


def written(folder, architecture="LlamaForCausalLM", kind=torch.float32, shards=1, **more):
    """Write a network's folder; return it."""
    import transformers

    name, arguments, data = (NETWORKS | MIXTURES)[architecture]
    torch.manual_seed(0)
    settings = _settings(name, {**arguments(), **more})
    model = getattr(transformers, architecture)(settings).to(kind).eval()
    with torch.no_grad():  # biases and gains of a fresh network are all alike
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size if shards == 1 else size // shards)
    return with_tokenizer(folder) if data == "text" else folder


def data_for(architecture, folder):
    """Write calibration data and return their path."""
    kind = (NETWORKS | MIXTURES)[architecture][2]
    g = np.random.default_rng(0)
    if kind == "text":
        path = folder / "text.txt"
        path.write_text("\n".join(sentences()))
        return path
    shape = {"images": (40, 3, 16, 16), "sound": (24, 800), "features": (24, 8, 32)}[kind]
    path = folder / "data.npy"
    np.save(path, g.standard_normal(shape).astype(np.float32))
    return path


def timm_folder(folder, name="test_resnet", **more):
    """Write a timm network's folder; return it and the network."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=4, **more).eval()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    settings = {"architecture": name, "num_classes": 4, "model_args": more}
    settings["pretrained_cfg"] = {
        "input_size": [3, 32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2],
        "crop_pct": 0.9, "interpolation": "bilinear", "architecture": name,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model
