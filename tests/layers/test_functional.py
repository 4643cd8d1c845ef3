"""Weights that are used through functions, in subclasses, and as slices of one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.calibration.forward import learn
from lobs.errors import NumericalWarning
from lobs.layers import find_layers
from lobs.layers.discovery import open_questions
from lobs.layers.folding import folded
from lobs.layers.untouched import copied
from tests.architectures import plain


class Left(nn.Module):
    """Multiply from the left, with another module's weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x):
        z = self.inner.weight @ x.transpose(1, 2)
        return self.out(F.relu(z.transpose(1, 2)))


class Plain(Left):
    def forward(self, x):
        return self.out(F.relu(F.linear(x, self.inner.weight)))


class Batched(nn.Module):
    """Multiply all matrices at once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(F.relu(torch.bmm(x.transpose(0, 1), self.weight)).sum(dim=0))


def layers(model, batch):
    learn(model.eval(), [batch], always=True)
    return {layer.name: layer for layer in find_layers(model)}


def halved(model, batches):
    return lobs.prune(
        model, batches, lobs.Sparsity(0.5, scope="layer"), refit="layers", progress=False
    )


def test_a_subclass_that_computes_the_same_is_pruned_as_the_plain_layer():
    own, batch = plain.NETWORKS["own-forward"]()
    same = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5)).eval()
    same.load_state_dict(own.state_dict())
    batches = [batch(32) for _ in range(4)]
    assert open_questions(own) and not open_questions(same)
    a, b = halved(own, batches), halved(same, batches)
    assert [row.name for row in a.layers] == ["0", "2"]
    for name, weight in b.model.state_dict().items():
        torch.testing.assert_close(a.model.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    assert type(a.model[0]) is plain.Cast and "forward" not in vars(own[0])


@pytest.mark.parametrize("kind", [Left, Plain])
def test_the_inputs_of_a_call_are_those_of_the_plain_formula(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 7, 6)
    layer, seen, outs = layers(model, x)["inner"], [], []
    with lobs.layers.watching([layer.on_input(seen.append), layer.on_output(outs.append)]):
        model(x)
    assert torch.equal(seen[0], x) and layer.rows == 10 and layer.columns == 6
    torch.testing.assert_close(outs[0], x @ model.inner.weight.T)
    assert layer.bias is None and "forward" not in vars(model)


def test_a_module_that_never_runs_is_found_where_its_weight_is_used():
    result = halved(Left(), [torch.randn(8, 7, 6) for _ in range(3)])
    assert {row.name: row.kept for row in result.layers} == {"inner": 30, "out": 20}


def test_outputs_that_come_back_take_their_place_in_both_factors():
    for kind in (Left, Plain):
        torch.manual_seed(0)
        model, x = kind(), torch.randn(8, 7, 6)
        layer = layers(model, x)["inner"]
        with lobs.layers.watching([layer.on_output(torch.zeros_like)]):
            assert torch.equal(model(x), model.out.bias.expand(8, 7, 4))


def test_a_batched_product_is_a_grouped_layer():
    model, x = Batched(), torch.randn(30, 3, 5)
    layer = layers(model, x)["model"] if "model" in layers(model, x) else layers(model, x)["weight"]
    assert (layer.groups, layer.rows, layer.columns) == (3, 4, 5)
    (patches,) = layer.patches(x.transpose(0, 1))
    torch.testing.assert_close(
        patches @ layer.matrix().mT, torch.bmm(x.transpose(0, 1), model.weight)
    )
    assert torch.equal(layer.folded(layer.matrix()), model.weight)
    result = halved(model, [x, torch.randn(30, 3, 5)])
    assert result.total == 68 and result.kept == 34


def test_convolutions_with_their_own_padding_are_seen_at_the_call():
    model, batch = plain.NETWORKS["padded"]()
    found = layers(model, batch(4))
    layer, seen = found["0.0"], []
    with lobs.layers.watching([layer.on_input(seen.append)]):
        model(batch(4))
    assert seen[0].shape == (4, 3, 15, 15)  # padded already
    patches = torch.cat(list(layer.patches(seen[0])), dim=1)
    z = patches @ layer.matrix()[..., :-1].mT + model[0][0].bias
    wanted = model[0][0](seen[0][..., 1:-2, 1:-2]).permute(0, 2, 3, 1).reshape(1, -1, 8)
    torch.testing.assert_close(z, wanted, rtol=1e-4, atol=1e-5)


def test_standardised_weights_are_left_dense_with_one_reason_for_all():
    model, batch = plain.NETWORKS["standardised"]()
    with pytest.warns(NumericalWarning, match=r"Left dense: '0\.0', '0\.2' \(.*before it is used"):
        result = halved(model, [batch(16) for _ in range(3)])
    assert [row.name for row in result.layers] == ["3"]


def test_experts_in_one_parameter_are_layers_of_their_own():
    model, batch = plain.NETWORKS["stacked-experts"]()
    before = {name: p.clone() for name, p in model.named_parameters()}
    result = halved(model, [batch(64) for _ in range(5)])
    names = [f"1.{part}.{e}" for part in ("up", "down") for e in range(4)]
    assert {row.name for row in result.layers} == {"0", "1.router", *names, "2"}
    assert result.coverage.prunable == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    for part in ("1.up", "1.down"):
        mask = result.masks[part]
        assert [int(m.sum()) for m in mask] == [192] * 4
        assert not bool(result.model.get_parameter(part)[~mask].any())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_expert_without_tokens_stays_dense_and_a_rare_one_is_named():
    model, batch = plain.NETWORKS["stacked-experts"]()
    with torch.no_grad():
        model[1].router.bias.copy_(torch.tensor([0.0, -1e4, -0.35, 0.0]))
    with pytest.warns(NumericalWarning, match=r"1\.up\.1.*no batch runs it"):
        result = halved(model, [batch(32) for _ in range(3)])
    assert torch.equal(result.model[1].up[1], model[1].up[1])
    rare = result.settings["rarely used"]
    assert rare["1.up.2"] < 96 and "1.up.2" in result.summary()


def test_a_copy_knows_what_is_known_of_its_network():
    model, batch = plain.NETWORKS["stacked-experts"]()
    names = [*layers(model, batch(8))]
    assert [layer.name for layer in find_layers(copied(model))] == names


@pytest.mark.parametrize(
    "name", ["weight-norm", "spectral-norm", "old-weight-norm", "old-spectral-norm"]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated:FutureWarning")
def test_parametrised_weights_are_folded_in_a_copy(name):
    model, batch = plain.NETWORKS[name]()
    with torch.no_grad():
        model(batch(4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [batch(32) for _ in range(3)]
    with pytest.warns(NumericalWarning, match="weights of '0', '2' are parametrised.*folded"):
        result = halved(model, batches)
    with torch.no_grad():
        torch.testing.assert_close(folded(model)(batches[0]), model(batches[0]))
    assert result.kept == result.total // 2 == (12 * 32 + 32 * 5) // 2
    assert type(result.model[0]) is nn.Linear and "weight" in result.model[0].state_dict()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(lobs.LobsError, match="cannot be written in place"):
        lobs.prune(model, batches, keep=0.5, inplace=True, progress=False)
