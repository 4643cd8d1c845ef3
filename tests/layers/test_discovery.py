from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lobs
from lobs.cli import app
from lobs.errors import UnsupportedLayerError
from lobs.layers import find_layers, refused_layers, uncovered_weights


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=6)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))

    def forward(self, tokens):
        x = self.encoder(self.memory(self.embedding(tokens))[0])
        return self.head(self.mix(x.mT).mT)


def test_every_kind_is_found_in_the_order_of_the_module_tree():
    attention = [f"encoder.self_attn.{role}_proj" for role in ("q", "k", "v", "out")]
    memory = ["memory.ih_l0", "memory.hh_l0"]
    names = [*memory, *attention, "encoder.linear1", "encoder.linear2", "mix"]
    assert [layer.name for layer in find_layers(Mixed(), skip="head")] == names


def test_what_is_not_pruned_is_named():
    model = Mixed()
    assert [*refused_layers(model)] == ["head"] and "parametrised" in refused_layers(model)["head"]
    assert uncovered_weights(model) == {
        "embedding.weight": 42,
    } | {
        name: p.numel()
        for name, p in model.named_parameters()
        if name.startswith("head.") and p.dim() > 1
    }


def test_an_empty_choice_names_what_could_be_pruned():
    with pytest.raises(
        UnsupportedLayerError,
        match="Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, MultiheadAttention",
    ):
        find_layers(nn.Bilinear(3, 3, 3))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d])
def test_a_convolution_with_its_own_forward_is_refused(kind):
    class Own(kind):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(UnsupportedLayerError, match=f"not as {kind.__name__} does"):
        find_layers(Own(2, 2, 3))


def test_parametrised_and_lazy_ones_are_refused_whatever_their_kind():
    attention = nn.MultiheadAttention(4, 2)
    nn.utils.parametrizations.weight_norm(attention, "in_proj_weight")
    with pytest.raises(UnsupportedLayerError, match=r"'0.q_proj', .* 1 more: its weight is param"):
        find_layers(nn.Sequential(attention))
    with pytest.raises(UnsupportedLayerError, match="no shape yet"):
        find_layers(nn.LazyConvTranspose1d(2, 3))
    two = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(2)))
    assert [*refused_layers(two)] == [
        "0",
        "1",
    ]  # computed weights are never taken for one that is shared


def test_all_refusals_are_told_once_with_the_line_that_goes_on():
    plain = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(nn.Linear(3, 3), *(plain(nn.Linear(3, 3)) for _ in range(2)))
    assert [layer.name for layer in find_layers(model)] == ["0"]
    with pytest.raises(UnsupportedLayerError, match=r"2 layers .*'1', '2': .*skip=\['1', '2'\]"):
        find_layers(model, "*")
    with pytest.raises(lobs.LobsError, match=r"2 layers are like that.*skip=\['1', '2'\]"):
        two = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1))
        lobs.prune(two, [torch.randn(9, 8)], lobs.Structured({"*": 0.5}), progress=False)


def test_a_network_that_running_would_change_is_refused_even_where_its_lazy_layer_is_skipped():
    model = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    with pytest.raises(
        UnsupportedLayerError,
        match=r"layer '1': its weight has no shape yet; run one batch first\.$",
    ):
        find_layers(model, "0")


def test_an_observation_ends_however_often_it_is_ended():
    model = nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(4, 2))
    seen = []
    handles = [layer.on_input(seen.append) for layer in find_layers(model) for _ in range(2)]
    assert len(find_layers(model)) == 5  # also while observed
    model[0](input=torch.ones(1, 3))
    assert len(seen) == 2
    for handle in [*handles, *handles]:
        handle.remove()
    model[0](torch.ones(1, 3))
    assert (
        len(seen) == 2
        and "forward" not in model[1].__dict__
        and torch.backends.mha.get_fastpath_enabled()
    )


def test_an_output_that_comes_back_takes_its_place():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    (layer,) = find_layers(model)
    handle = layer.on_output(lambda z: torch.full_like(z, 2.0))
    assert bool((model(torch.ones(1, 3)) == 2).all())
    handle.remove()
    assert not bool((model(torch.ones(1, 3)) == 2).any())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mixed_network.py").write_text(
        "import torch\nfrom tests.layers.test_discovery import Mixed\n\n\n"
        "def network():\n    torch.manual_seed(0)\n    model = Mixed().eval()\n"
        "    return model, [torch.randint(0, 7, (20, 5)) for _ in range(3)], lambda m: 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_line_takes_every_kind(folder):
    def run(*arguments):
        done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(run("inspect", "mixed_network:network", "--json"))
    types = [layer["type"] for layer in found["layers"]]
    assert len(types) == 9 and types[:3] == ["LSTM", "LSTM", "MultiheadAttention"]
    assert [*found["refused"]] == ["head"] and "embedding.weight" in found["not_covered"]
    text = run("inspect", "mixed_network:network")
    assert (
        "refused: layer 'head': its weight is parametrised" in text
        and "not covered: embedding.weight (42" in text
    )
    run(
        "prune",
        "mixed_network:network",
        "--keep",
        "50%",
        "--skip",
        "head",
        "--out",
        "x.safetensors",
        "--report",
        "x.html",
    )
    assert "encoder.self_attn.k_proj" in (folder / "x.html").read_text()
    assert "everything holds" in run("verify", "x.safetensors", "--trust")
    assert lobs.load("x.safetensors").masks["encoder.self_attn.in_proj_weight"].shape == (18, 6)
