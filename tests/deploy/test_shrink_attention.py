"""Shrink networks with attention, and architectures of Hugging Face with their configurations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.forward import call, main_output
from lobs.deploy.shrink import fit_to
from tests.calibration.test_channels import Attention, made


def pruned(model, batches, fraction=0.3):
    options = {"refit": "layers", "progress": False}
    return lobs.prune(model, batches, lobs.Structured(fraction), **options).model


def test_a_fresh_network_takes_the_shrunk_ones_heads():
    model, x, _ = made("attention")
    smaller, report = lobs.shrink(pruned(model, list(torch.randn(3, 8, 5, 16)), 0.5), x)
    assert report.attributes["num_kv_heads"] == 1 and report.attributes["q.out_features"] == 8
    fresh = fit_to(Attention(), smaller.state_dict(), report.attributes)
    torch.testing.assert_close(fresh(x), smaller(x))


def test_the_mlp_of_a_torch_transformer_shrinks_and_heads_stay_with_a_reason():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(4, 6, 16)
    masked = pruned(model, [torch.randn(8, 6, 16) for _ in range(3)])
    smaller, report = lobs.shrink(masked, x)
    assert smaller.layers[1].linear1.out_features == 22 and report.after < report.before
    torch.testing.assert_close(smaller(x), masked(x), rtol=1e-5, atol=1e-5)


class Routed(nn.Module):
    """Runs one of two layers by a computed value; the other may read what the first does not."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        return self.one(h.relu()) if bool((x.sum() > -1e9).all()) else self.two(h.relu())


def test_a_branch_on_computed_values_is_refused():
    model = Routed()
    with torch.no_grad():
        model.one.weight[:, 2] = 0
    with pytest.raises(lobs.LobsError, match=r"'two.weight' took no part"):
        lobs.shrink(model, torch.randn(3, 4))


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
SMALL = {**SIZES, "intermediate_size": 48}
DECODER = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
VISION = {"image_size": 16, "patch_size": 8, "num_labels": 3}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
# Architecture, configuration, whether save_pretrained can be undone.
FAST = [("LlamaForCausalLM", DECODER, True), ("BertModel", SMALL, False)]
SLOW = [
    ("Qwen2ForCausalLM", DECODER, True),
    ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, True),
    ("GemmaForCausalLM", {**DECODER, "head_dim": 8}, True),
    ("PhiForCausalLM", DECODER, True),
    ("GPTNeoXForCausalLM", SMALL, False),
    ("RobertaModel", SMALL, False),
    ("AlbertModel", {**SMALL, "embedding_size": 16}, False),
    ("DebertaV2Model", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p"]}, False),
    ("GPT2Model", GPT2, False),
    ("T5Model", {**T5, "decoder_start_token_id": 0}, True),
    ("ViTForImageClassification", {**SMALL, **VISION}, True),
    ("Dinov2Model", {**SMALL, **VISION}, False),
]


@pytest.mark.parametrize(
    ("name", "sizes", "loads"), [*FAST, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_hugging_face_networks_shrink_with_their_configuration(name, sizes, loads, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = getattr(transformers, name)
    sizes = {k: v for k, v in sizes.items() if k != "vocab_size" or "image_size" not in sizes}
    model = network(network.config_class(**sizes, tie_word_embeddings=False)).eval()
    if "image_size" in sizes:
        batches = [{"pixel_values": torch.randn(8, 3, 16, 16)} for _ in range(3)]
    else:
        batches = [{"input_ids": torch.randint(1, 60, (8, 10))} for _ in range(3)]
        if model.config.is_encoder_decoder:
            batches = [{**b, "decoder_input_ids": b["input_ids"]} for b in batches]
    masked = pruned(model, batches)
    smaller, report = lobs.shrink(masked, batches)
    assert report.after < 0.95 * report.before
    with torch.no_grad():
        ours, theirs = (main_output(call(net, batches[0])) for net in (smaller, masked))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (report.missing == "") == loads, report.missing
        if loads:
            smaller.save_pretrained(tmp_path)
            again = network.from_pretrained(tmp_path).eval()
            torch.testing.assert_close(main_output(call(again, batches[0])), ours)
