from __future__ import annotations

import pytest
import torch

from lobs import LobsError, zoo
from lobs.zoo.datasets import mnist
from lobs.zoo.training import Recipe, error_rate, train


def test_networks_have_the_papers_sizes():
    sizes = {
        name: sum(p.numel() for p in zoo.fresh(name).parameters())
        for name in zoo.ZOO
        if zoo.entry(name).recipe
    }
    assert sizes == {
        "lenet300": 266_610,
        "lenet5": 431_080,
        "cifarnet": 145_962,
        "cifarnet-wide": 1_141_482,
    }
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in zoo.entry(name).build().parameters())
            for name in ("alexnet", "vgg16", "resnet50")
        }
    assert sizes == {"alexnet": 61_100_840, "vgg16": 138_357_544, "resnet50": 25_557_032}


@pytest.mark.parametrize(("name", "worst"), [("lenet300", 1.8), ("lenet5", 1.0)])
def test_shipped_networks_are_well_trained(name, worst):
    assert error_rate(zoo.trained(name), mnist.load("test").batches()) <= worst


def test_the_same_seed_gives_the_same_network():
    data = mnist.load("test")
    small = mnist.LabelledImages(data.images[:256], data.labels[:256])
    nets = [
        train(zoo.fresh("lenet300", s), small, Recipe(1, 0.1, 64), seed=s, progress=False)
        for s in (0, 0, 1)
    ]
    first, again, other = (net.fc1.weight for net in nets)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_fresh_network_leaves_the_global_seed_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    zoo.fresh("lenet300", 1)
    assert torch.equal(torch.rand(3), expected)


def test_unknown_network_names_the_choices(tmp_path):
    with pytest.raises(LobsError, match="There are: lenet300, lenet5"):
        zoo.fresh("resnet")
    with pytest.raises(LobsError, match="does not fit LeNet-5"):
        zoo.trained("lenet5", zoo.shipped("lenet300"))
