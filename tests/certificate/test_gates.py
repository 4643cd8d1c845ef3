"""Bounds through gates, broadcasts, constants and poolings are never below what is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.certificate import lipschitz
from lobs.layers import Layer, find_layers

POOLS = (
    nn.AdaptiveMaxPool2d(4), nn.AdaptiveMaxPool2d((5, None)), nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.ReflectionPad2d(2), nn.ReplicationPad2d(1),
    nn.ZeroPad2d(1), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.MaxPool2d(3, 1),
    nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.SyncBatchNorm(4),
)  # fmt: skip


class Gated(nn.Module):
    """A convolution, a step, a gate of the result or of the input, and a broadcast sum."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.way = seed % 6
        self.first, self.gate = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.step, self.head = POOLS[seed % len(POOLS)], nn.LazyLinear(3)
        self.scale = nn.Parameter(3 * torch.randn(1, 4, 1, 1))
        self.register_buffer("var", torch.rand(4) + 0.1)
        if isinstance(self.step, nn.InstanceNorm2d | nn.SyncBatchNorm):
            self.step.running_var.uniform_(0.1, 2)

    def forward(self, x):
        h, g = self.first(x), self.gate(x)
        match self.way:
            case 0:
                h = torch.tanh(h) * torch.sigmoid(g) + (1 - torch.sigmoid(g)) * F.relu6(h)
            case 1:  # squeeze and excite a bounded signal
                h = h.tanh() * F.hardsigmoid(g.mean((2, 3), keepdim=True))
            case 2:
                h = h + g.mean((2, 3), keepdim=True)  # its deviation is repeated
            case 3:
                h = h * self.scale * (self.var + 1e-3).rsqrt().reshape(1, -1, 1, 1) / 2
            case 4:
                h = torch.softmax(h, 1) * x.sigmoid() + torch.cat([g, h], 1).amax(1, keepdim=True)
            case 5:
                gate = F.softsign(g) * h.sigmoid()
                h = F.interpolate(gate * gate, scale_factor=2, mode="nearest")
        return self.head(self.step(h).flatten(1))


@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
def test_of_gated_networks(inputs):
    for seed in range(12):
        model = Gated(seed).eval()
        data = [3 * torch.randn(9, 4, 6, 6) for _ in range(2)]
        with torch.no_grad():
            model(data[0])  # the head learns its size
        found = lobs.prune(
            model, data, lobs.Sparsity(0.3, scope="layer"), inputs=inputs, refit="layers",
            solver="magnitude", progress=False, numerics=lobs.Numerics(batch_norm=False),
        ).certificate  # fmt: skip
        assert found.reason == "", seed
        assert found.measured <= found.bound <= found.frobenius_bound * (1 + 1e-9), seed


@pytest.mark.parametrize("step", POOLS, ids=lambda m: type(m).__name__)
def test_a_step_stretches_no_deviation_by_more_than_its_constant(step):
    torch.manual_seed(0)
    shape = torch.Size((1, 4, 6, 6) if isinstance(step, nn.PixelUnshuffle) else (1, 4, 7, 7))
    constant = lipschitz._gain(lipschitz.step_of(_node(), step.eval()), shape)
    worst = 0.0
    for _ in range(100):
        x = torch.randn(shape)
        # One element moves most where windows overlap.
        y = x + torch.zeros(shape).index_put_((torch.tensor(0), *_place(shape)), torch.tensor(9.0))
        with torch.no_grad():
            worst = max(worst, float((step(x) - step(y)).norm() / (x - y).norm()))
    assert 0 < worst <= constant * (1 + 1e-5)


def _node():
    return torch.fx.Graph().placeholder("x")


def _place(shape):
    return tuple(torch.randint(n, ()) for n in shape[1:])


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        gate, other = self.a(x).sigmoid(), self.b(x).tanh()
        whole = gate.view(-1, 6)
        whole.add_(50)
        return gate * other


def test_a_gate_that_was_written_into_is_no_gate():
    found = lobs.prune(Writing(), [torch.randn(40, 6)], keep=0.5, progress=False).certificate
    assert found.bound is None and "'mul'" in found.reason


def test_products_that_are_not_bounded_are_named():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x) * self.b(x).sigmoid()

    found = lobs.prune(Product(), [torch.randn(40, 6)], keep=0.5, progress=False).certificate
    assert found.bound is None and found.reason == "no Lipschitz constant is known for 'mul'"
    assert isinstance(find_layers(Product())[0], Layer)
