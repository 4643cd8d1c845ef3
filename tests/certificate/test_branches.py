"""The bound through branches, sums and concatenations is never below what is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.certificate.bound import Link, compose


class Branches(nn.Module):
    """A random network of convolutions whose steps take any of the earlier outputs."""

    def __init__(self, seed):
        super().__init__()
        g = self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.plan = torch.randint(0, 1000, (6, 3), generator=g).tolist()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(4, 4, 3, padding=1),
                nn.Conv2d(4, 4, 1, groups=2),
                nn.ConvTranspose2d(4, 4, 3, padding=1),
                nn.Conv2d(4, 4, 3, padding=1, groups=4),
                nn.Conv2d(8, 4, 1),
                nn.Conv2d(4, 4, 3, padding=1),
            ]
        )
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_var.uniform_(0.5, 2.0, generator=g)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AvgPool2d(2)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        seen = [x * 1.0]
        for conv, (first, second, kind) in zip(self.convs, self.plan, strict=True):
            a, b = seen[first % len(seen)], seen[second % len(seen)]
            h = torch.cat([a, b], 1) if conv.in_channels == 8 else a - b if kind % 5 == 0 else a
            h = conv(h)
            if kind % 3 == 0:
                h = self.relu(h)
            if kind % 4 == 0:
                h = h + b
            if kind % 4 == 1:
                h += b
            if kind % 7 == 0:
                left, right = h.chunk(2, dim=1)
                h = torch.cat([right.sigmoid(), left], dim=1)
            seen.append(self.norm(h) if kind % 2 else h + h)
        return self.head(self.pool(seen[-1].permute(0, 1, 3, 2)).flatten(1))


@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
def test_of_random_networks(inputs):
    given = 0
    for seed in range(12):
        model = Branches(seed).eval()
        data = [torch.randn(10, 4, 6, 6) for _ in range(2)]
        found = lobs.prune(
            model, data, lobs.Sparsity(0.4, scope="layer"), inputs=inputs, refit="layers",
            solver="magnitude", progress=False, numerics=lobs.Numerics(batch_norm=False),
        ).certificate  # fmt: skip
        assert found.measured is not None
        if found.bound is None:
            assert "writes into" in found.reason or "not a step" in found.reason
            continue
        given += 1
        assert found.bound >= found.measured
        assert found.frobenius_bound >= found.bound * (1 - 1e-9)
    assert given >= 9


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        h = self.a(x)
        return h + self.b(h.relu())


def test_a_residual_sum_by_hand():
    torch.manual_seed(0)
    model, x = Bottleneck(), torch.randn(50, 6)
    other = Bottleneck()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.a.weight[0] = 0
    found = lobs.certify(model, other, [x])
    with torch.no_grad():
        error = float((model.a(x) - other.a(x)).square().sum(1).mean().sqrt())
        gain = 1 + float(torch.linalg.matrix_norm(model.b.weight, 2))
    assert found.bound == pytest.approx(gain * error, rel=1e-4) and found.bound >= found.measured


class Reading(nn.Module):
    """Reads a pruned layer's weight outside the layer, or lists several outputs."""

    def __init__(self, way):
        super().__init__()
        self.fc, self.way = nn.Linear(6, 6), way

    def forward(self, x):
        h = self.fc(x)
        if self.way == "weight":
            return h + self.fc.weight[0]
        if self.way == "product":
            return h * h
        if self.way == "scaled":
            return torch.add(x, h, alpha=3)
        if self.way == "list":
            return h[:, [0, 0, 0]]
        if self.way == "written":
            y = z = x * 2
            y += h
            return z + h
        return h.max(dim=1)


@pytest.mark.parametrize("way", ["weight", "product", "scaled", "list", "written", "several"])
def test_steps_that_are_not_covered_are_refused(way):
    certificate = lobs.prune(
        Reading(way), [torch.randn(40, 6)], keep=0.5, progress=False
    ).certificate
    assert certificate.bound is None and certificate.reason


def test_squares_add_where_tensors_are_put_side_by_side():
    links = [
        Link("a", 1, 1, 3.0, key="a", takes=()),
        Link("b", 1, 1, 4.0, key="b", takes=()),
        Link("cat", 2, 2, key="cat", takes=("a", "b"), joined="stack"),
        Link("sum", 1, 1, key="sum", takes=("cat", "a")),
    ]
    assert compose(links[:3]).bound == pytest.approx(10)
    assert compose(links).bound == pytest.approx(13)
    over = [*links[:2], Link("relu_", 2, 2, key="r", takes=("a",), overwrites=("a",))]
    assert compose([*over, Link("x", 1, 1, takes=("a",))]).bound == pytest.approx(6)
