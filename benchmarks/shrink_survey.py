"""Show how many parameters `Structured(0.3)` and `shrink` leave of many architectures.

    python -m benchmarks.shrink_survey [--only GLOB] [--fraction 0.3]

Networks are small random versions from transformers and timm. The output difference is that of the
shrunk network from the masked one, relative to the largest output.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import lobs
from lobs.calibration.forward import call, main_output

ENCODER = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}
HEADED = {**DECODER, "head_dim": 8}
VISION = {**ENCODER, "image_size": 16, "patch_size": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "tie_word_embeddings": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 60,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DISTILBERT = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertModel": ENCODER,
    "RobertaModel": ENCODER,
    "DistilBertModel": DISTILBERT,
    "AlbertModel": {**ENCODER, "embedding_size": 16},
    "ElectraModel": {**ENCODER, "embedding_size": 16},
    "DebertaV2Model": {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "MPNetModel": ENCODER,
    "ModernBertModel": {**ENCODER, "pad_token_id": 0},
    "RoFormerModel": ENCODER,
    "GPT2Model": GPT2,
    "GPTJModel": {**GPT2, "rotary_dim": 4},
    "GPTNeoXModel": ENCODER,
    "BloomModel": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    "OPTModel": {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "LlamaModel": DECODER,
    "MistralModel": HEADED,
    "Qwen2Model": DECODER,
    "Qwen3Model": HEADED,
    "GemmaModel": HEADED,
    "Gemma2Model": HEADED,
    "PhiModel": DECODER,
    "Phi3Model": {**DECODER, "bos_token_id": 1, "eos_token_id": 2},
    "StableLmModel": DECODER,
    "CohereModel": DECODER,
    "T5Model": {**T5, "decoder_start_token_id": 0},
    "BartModel": BART,
    "ViTModel": VISION,
    "DeiTModel": VISION,
    "BeitModel": VISION,
    "Dinov2Model": VISION,
    "SwinModel": {**SWIN, "window_size": 4},
    "ConvNextModel": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"embed_dim": 48, "depth": 2, "img_size": 64},
    "cait_xxs24_224": {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64},
    "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)},
    "resnet18": {"layers": [1, 1, 1, 1]},
    "resnet50": {"layers": [1, 1, 1, 1]},
    "resnext50_32x4d": {"layers": [1, 1, 1, 1]},
    "seresnet50": {"layers": [1, 1, 1, 1]},
    "regnetx_002": {},
    "regnety_002": {},
    "densenet121": {"block_config": (2, 2, 2)},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "mnasnet_050": {},
    "ghostnet_050": {},
    "res2net50_26w_4s": {"layers": [1, 1, 1, 1]},
    "repvgg_a0": {},
    "lcnet_035": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="glob of names")
    parser.add_argument("--fraction", type=float, default=0.3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| network | parameters | left | output difference | from_pretrained | stays |")
    print("|---|---|---|---|---|---|")
    total = smaller = 0
    for name, model, batches in networks(given.only):
        total += 1
        smaller += survey(name, model, batches, given.fraction)
    print(f"\n{smaller} of {total} are smaller, with the same output.")


def networks(only: str) -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """Yield names, networks and batches."""
    import transformers

    for name, sizes in TRANSFORMERS.items():
        if fnmatchcase(name, only):
            torch.manual_seed(0)
            kind = getattr(transformers, name)
            model = kind(kind.config_class(**sizes)).eval()
            yield name, model, [inputs_for(model) for _ in range(3)]
    import timm

    for name, sizes in TIMM.items():
        if fnmatchcase(name, only):
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=10, **sizes).eval()
            side = 224 if name.startswith("swin") else 64
            yield name, model, [torch.randn(8, 3, side, side) for _ in range(2)]


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """Return a random batch for a network of transformers."""
    if model.main_input_name == "pixel_values":
        side = getattr(model.config, "image_size", 64)
        return {"pixel_values": torch.randn(8, 3, side, side)}
    tokens = torch.randint(3, 60, (8, 10))
    double = model.config.is_encoder_decoder
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if double else {})


def survey(name: str, model: nn.Module, batches: list[Any], fraction: float) -> bool:
    """Print one line, and return whether the network is smaller with the same output."""
    try:
        result = lobs.prune(
            model, batches, lobs.Structured(fraction), refit="layers", progress=False
        )
        small, report = lobs.shrink(result.model, batches)
    except lobs.LobsError as error:
        print(f"| {name} | | | | | {error} |", flush=True)
        return False
    with torch.no_grad():
        masked, ours = (main_output(call(net, batches[0])) for net in (result.model, small))
    assert masked is not None and ours is not None
    difference = float((ours - masked).abs().max() / masked.abs().max())
    loads = ("no" if report.missing else "yes") if hasattr(model, "config_class") else ""
    print(
        f"| {name} | {report.before:,} | {report.after / report.before:.1%} | {difference:.0e} | "
        f"{loads} | {'; '.join(report.stayed[:1])} |",
        flush=True,
    )
    return report.after < report.before and difference < 1e-4


if __name__ == "__main__":
    main()
