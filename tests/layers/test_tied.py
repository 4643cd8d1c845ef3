"""One weight, several uses: inputs of all of them count, and one solution serves them all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.certificate.verify import verify_errors, verify_masks
from lobs.errors import NumericalWarning, UnsupportedLayerError
from lobs.layers import find_layers
from tests.layers.test_flipped import Conv1D


class Tied(nn.Module):
    """Two linear layers of one weight, with one, no or two biases, and a step in between."""

    def __init__(self, bias="shared"):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=bias != "none"), nn.Linear(6, 6, bias=bias != "none")
        self.b.weight = self.a.weight
        if bias == "shared":
            self.b.bias = self.a.bias
        self.double()

    def forward(self, x):
        return self.b(self.a(x).tanh()[::2])  # every other sample, so that the counts differ


@pytest.mark.parametrize("bias", ["shared", "none", "different"])
def test_the_error_is_that_of_all_uses_together(bias):
    model, x = Tied(bias), torch.randn(40, 6).double()
    result = lobs.prune(model, [x[:20], x[20:]], lobs.Sparsity(0.5), refit="layers", progress=False)
    assert [*result.masks] == ["a.weight"] and result.layers[0].samples == 60
    pruned = result.model
    assert pruned.a.weight is pruned.b.weight and bool(
        (pruned.b.weight[~result.masks["a.weight"]] == 0).all()
    )
    with torch.no_grad():
        y = model.a(x).tanh()[::2]
        off = (model.a(x) - pruned.a(x)).square().sum() + (model.b(y) - pruned.b(y)).square().sum()
    torch.testing.assert_close(result.solutions["a"].error, float(off) / 60, rtol=1e-8, atol=0)


def test_biases_that_differ_stay_as_they_are():
    model = Tied("different")
    result = lobs.prune(model, [torch.randn(40, 6).double()], lobs.Sparsity(0.5), progress=False)
    assert torch.equal(result.model.a.bias, model.a.bias) and torch.equal(
        result.model.b.bias, model.b.bias
    )
    assert result.solutions["a"].weight.shape == (1, 6, 6)


def test_a_shared_bias_compensates_for_both():
    model = Tied("shared")
    result = lobs.prune(
        model, [torch.randn(40, 6).double() + 1], lobs.Sparsity(0.5), progress=False
    )
    assert (
        not torch.equal(result.model.a.bias, model.a.bias)
        and result.model.a.bias is result.model.b.bias
    )


def test_a_tied_layer_is_chosen_by_any_of_its_names():
    model = nn.Sequential(Tied(), nn.Linear(6, 2))
    assert [layer.names for layer in find_layers(model)] == [("0.a", "0.b"), ("1",)]
    assert [layer.name for layer in find_layers(model, "0.b")] == ["0.a"]
    assert [layer.name for layer in find_layers(model, skip="*.b")] == ["1"]


@pytest.mark.parametrize("inputs", ["dense", "pruned"])
def test_a_tied_result_is_saved_and_verified(tmp_path, inputs):
    model, x = Tied(), [torch.randn(40, 6).double()]
    result = lobs.prune(model, x, lobs.Sparsity(0.5), inputs=inputs, progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert all(f.holds for f in verify_masks(saved) + verify_errors(saved, model, result.model, x))
    again = Tied()
    again.load_state_dict(saved.state_dict)
    torch.testing.assert_close(again(x[0]), result.model(x[0]))


def test_no_bound_is_claimed_for_a_weight_used_twice():
    class Chain(Tied):
        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    certificate = lobs.prune(
        Chain(), [torch.randn(40, 6).double()], lobs.Sparsity(0.5), progress=False
    ).certificate
    assert certificate.bound is None and "shares its weight" in certificate.reason


def test_tied_convolutions_must_cut_the_same_patches():
    def pair(**other):
        model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, **other))
        model[1].weight, model[1].bias = model[0].weight, model[0].bias
        return model

    model, x = pair(padding=1), torch.randn(5, 3, 6, 6)
    result = lobs.prune(model, [x], lobs.Sparsity(0.5), progress=False)
    with torch.no_grad():
        pruned, y = result.model, model[0](x)
        off = (y - pruned[0](x)).square().sum() + (model[1](y) - pruned[1](y)).square().sum()
    torch.testing.assert_close(
        result.solutions["0"].error, float(off) / (2 * 5 * 36), rtol=1e-4, atol=0
    )
    with pytest.raises(
        UnsupportedLayerError,
        match=r"its weight is shared by 0.weight, 1.weight.*Untie them, or skip",
    ):
        find_layers(pair(padding=1, stride=2))


def test_an_embedding_tied_to_the_last_layer_is_left_dense_with_a_note_unless_it_is_named():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body, self.head = (
                nn.Embedding(9, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 9, bias=False),
            )
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.relu(self.body(self.embedding(tokens))))

    model, tokens = Language(), torch.randint(0, 9, (5, 7))
    with pytest.raises(
        UnsupportedLayerError,
        match=r"'head': its weight is shared by embedding.weight, head.weight",
    ):
        lobs.prune(model, [tokens], lobs.Sparsity(0.5), layers=["body", "head"], progress=False)
    with pytest.raises(UnsupportedLayerError, match="its weight is shared"):
        lobs.prune(model, [tokens], keep={"head": 0.5}, progress=False)
    with pytest.warns(NumericalWarning, match=r"Left dense: 'head' \(its weight is shared"):
        result = lobs.prune(model, [tokens], lobs.Sparsity(0.5), progress=False)
    assert [row.name for row in result.layers] == ["body"] and result.layers[0].samples == 35
    assert result.coverage.prunable == 16 and result.coverage.weights == 9 * 4 + 4 * 4 + 4
    assert "Prunable: " in result.summary() and "'head'" in result.summary()
    again = lobs.prune(model, [tokens], lobs.Sparsity(0.5), skip="head", progress=False)
    assert again.coverage.left == {"skipped": ["head"]}


def test_a_square_linear_tied_to_its_transpose_is_refused():
    model = nn.ModuleList([nn.Linear(4, 4), Conv1D(4, 4)])
    model[1].weight = model[0].weight
    with pytest.raises(UnsupportedLayerError, match=r"shared by 0.weight, 1.weight"):
        find_layers(model)


def test_attentions_may_share_their_projections():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                nn.MultiheadAttention(4, 2, batch_first=True).double() for _ in range(2)
            )
            self.second.in_proj_weight, self.second.in_proj_bias = (
                self.first.in_proj_weight,
                self.first.in_proj_bias,
            )

        def forward(self, x):
            y = self.first(x, x, x, need_weights=False)[0]
            return self.second(y, x, x, need_weights=False)[0]

    model, x = Pair(), torch.randn(10, 3, 4).double()
    result = lobs.prune(model, [x], lobs.Sparsity(0.5), progress=False)
    assert [row.name for row in result.layers] == [
        f"first.{r}" for r in ("q_proj", "k_proj", "v_proj", "out_proj")
    ] + ["second.out_proj"]
    y = model.first(x, x, x)[0].detach()
    change = (model.first.in_proj_weight - result.model.first.in_proj_weight).detach()[:4]
    shift = (model.first.in_proj_bias - result.model.first.in_proj_bias).detach()[:4]
    off = sum(F.linear(z, change, shift).square().sum() for z in (x, y))
    torch.testing.assert_close(
        result.solutions["first.q_proj"].error, float(off) / 60, rtol=1e-8, atol=0
    )
