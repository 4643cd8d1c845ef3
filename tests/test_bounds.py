from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.bounds import Link, certify


def random_chain(seed):
    """A random small network of the kinds the theorem covers, and a batch for it."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    torch.manual_seed(seed)
    steps, channels, size = [], 2, 9
    activation = pick(nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.Sigmoid, nn.ELU)
    for _ in range(pick(0, 1, 2)):
        if size < 3:
            break
        width, kernel, groups = pick(2, 4), pick(1, 2, 3), pick(1, 2)
        conv = nn.Conv2d(channels, width, kernel, stride=pick(1, 2), padding=pick(0, 1), groups=groups, bias=pick(True, False))
        conv.padding_mode = "zeros"
        norm = nn.BatchNorm2d(width)
        nn.init.uniform_(norm.weight, -2, 2)
        norm.running_var.uniform_(0.3, 2)
        steps += [conv, pick(norm, nn.Identity()), activation()]
        channels = width
        size = (size + 2 * conv.padding[0] - kernel) // conv.stride[0] + 1
        if size > 3:
            pool = pick(nn.MaxPool2d(2), nn.MaxPool2d(3, stride=1), nn.AvgPool2d(2), nn.AvgPool2d(3, stride=2, padding=1))
            steps.append(pool)
            size = pool(torch.zeros(1, 1, size, size)).shape[-1]
    steps.append(nn.Flatten())
    features = channels * size * size
    for _ in range(pick(1, 2, 3)):
        width = pick(3, 8)
        steps += [nn.Linear(features, width), activation(), nn.Dropout(0.3)]
        features = width
    return nn.Sequential(*steps, nn.Linear(features, 4)), torch.randn(16, 2, 9, 9, generator=g)


@pytest.mark.parametrize("seed", range(200))
def test_certificate_is_never_below_what_is_measured(seed):
    model, x = random_chain(seed)
    solver = ("exact", "lobs", "magnitude", "random")[seed % 4]
    inputs = "pruned" if seed % 3 == 0 else "dense"
    result = lobs.prune(model, [x[:5], x[5:]], 0.2 + 0.1 * (seed % 7), solver=solver, inputs=inputs, progress=False)
    certificate = result.certificate
    assert certificate.reason == "" and certificate.measured is not None and certificate.bound is not None
    assert certificate.measured <= certificate.bound * (1 + 1e-5) + 1e-6
    assert certificate.bound <= certificate.frobenius_bound * (1 + 1e-9)
    assert sum(certificate.contributions.values()) == pytest.approx(certificate.bound)


def test_one_layer_is_bounded_by_exactly_what_happens():
    model = nn.Linear(6, 4)
    result = lobs.prune(model, [torch.randn(50, 6)], 0.5, progress=False)
    assert result.certificate.bound == pytest.approx(result.certificate.measured, rel=1e-4)


def test_rounding_does_not_hide_an_error_from_the_certificate():
    # Deep and shrinking: true layer errors are far below what float32 moments resolve, yet the bound must cover them.
    torch.manual_seed(0)
    layers = [step for _ in range(8) for step in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers)
    x = torch.randn(32, 8, 8, 8)
    result = lobs.prune(model, [x], 0.3, progress=False)
    dense, pruned, y = copy.deepcopy(model).double(), copy.deepcopy(result.model).double(), x.double()
    for name, solution in result.solutions.items():
        with torch.no_grad():
            true = float((dense[int(name)](y) - pruned[int(name)](y)).square().sum() / y[:, 0].numel())
            y = torch.relu(dense[int(name)](y))
        assert abs(solution.error - true) <= 1e-6 * solution.energy
        assert true == 0 or name in result.certificate.contributions
    assert result.certificate.bound >= result.certificate.measured


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes_are_counted_not_assumed(padding_mode):
    model = nn.Sequential(nn.Linear(6, 6), nn.Conv2d(2, 3, 3, padding=2, padding_mode=padding_mode), nn.Flatten())
    result = lobs.prune(model, [torch.randn(20, 2, 6, 6)], 0.9, progress=False)
    assert result.certificate.measured <= result.certificate.bound


def test_functional_forward_is_traced():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3)
            self.fc = nn.Linear(3 * 9, 4)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv(x)), 2)
            return self.fc(torch.flatten(x, 1))

        # view and size take the same way
        def other(self, x):
            return self.fc(x.view(x.size(0), -1))

    result = lobs.prune(Net(), [torch.randn(10, 1, 8, 8)], 0.5, progress=False)
    assert result.certificate.bound is not None and result.certificate.bound >= result.certificate.measured


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        return self.fc(self.fc(x))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize(
    ("model", "batch", "reason"),
    [
        (Residual(), torch.randn(8, 5), "branch or residual"),
        (Branching(), torch.rand(8, 5), "could not be traced"),
        (Twice(), torch.randn(8, 5), "more than once"),
        (Keywords(), {"x": torch.randn(8, 5)}, "keyword"),
        (nn.Sequential(nn.Linear(5, 5), nn.GELU()), torch.randn(8, 5), "no Lipschitz constant is known for '1' .GELU"),
        (nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), torch.randn(8, 5), "LayerNorm"),
    ],
)
def test_where_the_theorem_does_not_apply_it_refuses_with_a_reason(model, batch, reason):
    certificate = lobs.prune(model, [batch], 0.5, progress=False).certificate
    assert certificate.bound is None
    assert certificate.measured is not None and certificate.measured > 0
    assert re.search(reason, certificate.reason)
    assert "no bound" in str(certificate)


def test_certify_folds_gains_and_errors():
    certificate = certify([Link("a", 2, 3, 0.1), Link("relu", 0.5, 0.5), Link("b", 4, 5, 0.2)], measured=0.1)
    assert certificate.bound == pytest.approx(0.1 * 0.5 * 4 + 0.2)
    assert certificate.frobenius_bound == pytest.approx(0.1 * 0.5 * 5 + 0.2)
    assert certificate.contributions == pytest.approx({"a": 0.2, "b": 0.2})
