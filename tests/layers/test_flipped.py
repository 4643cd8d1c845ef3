"""Hugging Face's `Conv1D`: a linear layer whose weight is stored the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.layers import find_layers


class Conv1D(nn.Module):
    """What transformers has by this name, without the seconds that importing it takes."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(
            *x.shape[:-1], -1
        )


Conv1D.__module__ = "transformers.pytorch_utils"


def test_a_flipped_linear_layer_is_as_the_plain_one():
    x = torch.randn(50, 3, 7).double()
    plain, flipped = nn.Linear(7, 5).double(), Conv1D(5, 7).double()
    with torch.no_grad():
        flipped.weight.copy_(plain.weight.T)
        flipped.bias.copy_(plain.bias)
    expected = lobs.prune(plain, [x], lobs.Sparsity(0.6), progress=False)
    found = lobs.prune(flipped, [x], lobs.Sparsity(0.6), progress=False)
    assert torch.equal(found.masks["weight"], expected.masks["weight"].T)
    torch.testing.assert_close(found.model.weight, expected.model.weight.T)
    torch.testing.assert_close(found.certificate.bound, expected.certificate.bound)
    with torch.no_grad():
        off = (flipped(x) - found.model(x)).square().sum() / 150
    torch.testing.assert_close(found.solutions["model"].error, float(off), rtol=1e-8, atol=0)
    layer = find_layers(found.model)[0]
    matrix = layer.matrix()
    layer.write(torch.zeros_like(matrix))
    layer.write(matrix)
    torch.testing.assert_close(found.model.weight, expected.model.weight.T)
    z = torch.randn(4, 3, 5).double()
    torch.testing.assert_close(layer.by_unit(z), z.sum(dim=(0, 1)).unsqueeze(0))


def test_a_flipped_linear_layer_is_a_step_of_a_chain():
    model = nn.Sequential(Conv1D(6, 4), nn.ReLU(), Conv1D(2, 6))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    certificate = lobs.prune(
        model, [torch.randn(100, 4)], lobs.Sparsity(0.4), progress=False
    ).certificate
    assert certificate.bound is not None and certificate.bound >= certificate.measured > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_gpt2_is_pruned_layer_by_layer():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    batches = [{"input_ids": torch.randint(0, 50, (8, 16))} for _ in range(3)]
    result = lobs.prune(model, batches, lobs.Sparsity(0.5), skip="lm_head", progress=False)
    assert len(result.layers) == 8 and {row.samples for row in result.layers} == {384}
    assert result.kept * 2 == result.total
    first = "transformer.h.0.attn.c_attn"
    dense, pruned = model.get_submodule(first), result.model.get_submodule(first)
    seen = []
    dense.register_forward_hook(lambda _, args, z: seen.append((args[0], z)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
        off = sum(float((z - pruned(x)).square().sum()) for x, z in seen) / 384
    torch.testing.assert_close(result.solutions[first].error, off, rtol=1e-4, atol=0)
