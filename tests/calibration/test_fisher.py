from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lobs import LobsError, Sparsity, prune
from lobs.calibration.fisher import fisher_diagonal
from lobs.layers import find_layers

NETS = {
    "linear": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        torch.randn(40, 5),
    ),
    "no bias": lambda: (
        nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3)),
        torch.randn(40, 5),
    ),
    "conv": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ),
        torch.randn(12, 2, 6, 6),
    ),
    "groups": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
        torch.randn(12, 4, 4, 4),
    ),
}


def naive_fisher(model, x, seed):
    """One sample at a time, by autograd on the parameters, with the same drawn labels."""
    labels = torch.multinomial(
        model(x).softmax(1), 1, generator=torch.Generator().manual_seed(seed)
    ).squeeze(1)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one, label in zip(x, labels, strict=True):
        model.zero_grad()
        F.cross_entropy(model(one[None]), label[None]).backward()
        for name, p in model.named_parameters():
            total[name] += p.grad**2 / len(x)
    return total


@pytest.mark.parametrize("kind", NETS)
def test_it_is_the_mean_square_of_one_samples_gradient(kind):
    model, x = NETS[kind]()
    layers = find_layers(model)
    got = fisher_diagonal(model, [x], layers, seed=4)
    expected = naive_fisher(model, x, 4)
    for layer in layers:
        weight = expected[f"{layer.name}.weight"].reshape(layer.groups, layer.rows, layer.columns)
        torch.testing.assert_close(
            got[layer.name][..., : layer.columns], weight.double(), rtol=1e-4, atol=1e-9
        )
        if layer.bias is not None:
            bias = expected[f"{layer.name}.bias"].reshape(layer.groups, layer.rows)
            torch.testing.assert_close(
                got[layer.name][..., -1], bias.double(), rtol=1e-4, atol=1e-9
            )


def test_drawn_labels_average_to_the_gauss_newton_diagonal():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(20000, 3)
    got = fisher_diagonal(model, [x], find_layers(model))["0"][0, :, :3]
    p = model(x).softmax(1)
    expected = torch.einsum("nr,nc->rc", p * (1 - p), x**2) / len(
        x
    )  # diagonal of (diag p − ppᵀ) ⊗ xxᵀ
    torch.testing.assert_close(got, expected.double(), rtol=0.1, atol=0)


def test_pruning_by_it_cuts_what_the_loss_curves_least_for():
    model, x = NETS["linear"]()
    cut = prune(model, [x], Sparsity(0.5), solver="obd-fisher", inputs="dense", progress=False)
    for layer in find_layers(model):
        columns = slice(0, layer.columns)
        score = (
            layer.matrix()[0].double() ** 2
            * fisher_diagonal(model, [x], [*find_layers(model)])[layer.name][0]
        )[:, columns]
        mask = cut.masks[f"{layer.name}.weight"]
        assert float(score[~mask].max()) <= float(score[mask].min())
        assert torch.equal(
            cut.model.state_dict()[f"{layer.name}.weight"][mask], layer.weight.detach()[mask]
        )  # nothing else moves


def test_mistakes_are_named():
    with pytest.raises(LobsError, match="needs a classifier"):
        fisher_diagonal(
            nn.Sequential(nn.Conv2d(1, 2, 1)),
            [torch.randn(1, 1, 2, 2)],
            find_layers(nn.Sequential(nn.Conv2d(1, 2, 1))),
        )


def test_outputs_that_are_not_finite_are_refused():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(LobsError, match="needs finite outputs"):
        fisher_diagonal(model, [torch.ones(4, 3)], find_layers(model))


def test_a_generator_is_as_good_as_a_list():
    model, x = NETS["linear"]()
    options = {"solver": "obd-fisher", "inputs": "dense", "progress": False}
    once = prune(model, iter([x]), Sparsity(0.5), **options)
    again = prune(model, [x], Sparsity(0.5), **options)
    assert all(torch.equal(once.masks[name], again.masks[name]) for name in again.masks)


@pytest.mark.parametrize("module", [nn.ConvTranspose1d(4, 3, 2), nn.MultiheadAttention(4, 2)])
def test_layers_whose_samples_cannot_be_told_apart_are_refused_by_name(module):
    layer = find_layers(nn.Sequential(module))[0]
    with pytest.raises(LobsError, match=f"layer '{layer.name}'.*Use solver 'obd'"):
        fisher_diagonal(nn.Sequential(module), [torch.randn(2, 4, 4)], [layer])
