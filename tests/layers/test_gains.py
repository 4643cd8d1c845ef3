"""The certificate for convolutions of all dimensions, transposed ones included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

import lobs
from lobs.certificate import lipschitz
from lobs.layers import as_layer
from tests.layers.test_exactness import CONVOLUTIONS, TRANSPOSED, convolutions

POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@settings(max_examples=30, deadline=None)
@given(convolutions((*CONVOLUTIONS[:2], *TRANSPOSED[:2])))
def test_no_convolution_stretches_more_than_its_gain(case):
    module, x = case
    layer = as_layer("conv", module)
    x = (x if x.dim() == layer.dimensions + 2 else x.unsqueeze(0))[:1]
    spectral, frobenius = lipschitz._layer_gains(layer, x.shape, None)

    def linear(flat):
        return (module(flat.reshape(x.shape)) - module(torch.zeros_like(x))).flatten()

    whole = torch.func.jacrev(linear)(x.flatten()).detach()
    true = float(torch.linalg.matrix_norm(whole, ord=2))
    assert true <= spectral * (1 + 1e-9) + 1e-12 and spectral <= frobenius * (1 + 1e-9)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_transposed_convolution_whose_pieces_do_not_overlap_has_its_exact_gain(n):
    module = TRANSPOSED[n - 1](1, 1, 2, stride=2, bias=False)
    nn.init.ones_(module.weight)
    layer = as_layer("up", module)
    # Every input element is copied 2ⁿ times: it stretches by √2ⁿ, and the row of ones by as much
    # again in the bound.
    spectral, _ = lipschitz._layer_gains(layer, torch.Size((1, 1, *[3] * n)), None)
    assert spectral == pytest.approx(2**n)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_certificate_is_never_below_what_is_measured(n, seed):
    torch.manual_seed(seed)
    norm = NORMS[n](4)
    norm.running_var.uniform_(0.3, 2)
    model = nn.Sequential(
        CONVOLUTIONS[n - 1](2, 4, 3, padding=1, groups=1 + seed % 2),
        norm,
        nn.ReLU(),
        POOLS[n](2, ceil_mode=seed > 1),
        TRANSPOSED[n - 1](4, 2, 3, stride=2, padding=seed % 2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
    )
    x = torch.randn(12, 2, *[5] * n)
    inputs = "pruned" if seed == 3 else "dense"
    result = lobs.prune(
        model,
        [x],
        lobs.Sparsity(0.2 + 0.2 * seed),
        inputs=inputs,
        progress=False,
        numerics=lobs.Numerics(batch_norm=False),
    )
    certificate = result.certificate
    assert certificate.reason == "" and 0 < certificate.measured <= certificate.bound * (1 + 1e-5)


def test_an_attention_is_refused_with_a_reason():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    certificate = lobs.prune(
        Net(), [torch.randn(30, 3, 4)], lobs.Sparsity(0.5), progress=False
    ).certificate
    assert certificate.bound is None and certificate.reason and certificate.measured > 0


@settings(max_examples=30, deadline=None)
@given(convolutions(CONVOLUTIONS))
def test_what_reaches_no_patch_has_no_gain(case):
    module, x = case
    layer = as_layer("conv", module)
    assume(x.dim() == layer.dimensions + 2)
    counted = int(lipschitz._column_sums(layer.windows, x.shape).sum())
    zeros = layer.windows(torch.zeros_like(x)).numel()
    assert counted <= zeros  # padding takes places that no input element has
    if not any(module.padding):
        assert counted == zeros


class Tenfold(nn.Linear):
    """A layer that computes otherwise than its class promises."""

    def forward(self, x):
        return 10 * super().forward(x)


def test_a_layer_with_its_own_forward_has_no_gain():
    torch.manual_seed(0)
    x, patched = [torch.randn(100, 5)], nn.Linear(6, 3)
    patched.forward = lambda x: 10 * nn.functional.linear(x, patched.weight, patched.bias)
    for last in (Tenfold(6, 3), patched):
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), last)
        target = lobs.Sparsity(0.5)
        certificate = lobs.prune(model, x, target, skip="2", progress=False).certificate
        assert certificate.bound is None and certificate.reason


def test_a_network_with_an_optional_argument_has_a_bound():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x, mask=None):
            h = self.fc(x).sigmoid()
            return h if mask is None else h * mask

    x = [torch.randn(50, 5)]
    certificate = lobs.prune(Optional(), x, lobs.Sparsity(0.5), progress=False).certificate
    assert certificate.reason == "" and 0 < certificate.measured <= certificate.bound
