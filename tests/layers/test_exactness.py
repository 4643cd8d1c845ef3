"""For every kind of layer: what the matrix problem says is what the running module does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, hessian

import lobs
from lobs.layers import as_layer, find_layers

CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


@st.composite
def convolutions(draw, kinds=(*CONVOLUTIONS, *TRANSPOSED), most_padding=2):
    """Any convolution with an input that it takes, batched or not, in float64."""
    kind = draw(st.sampled_from(kinds))
    n = int(kind.__name__[-2])

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    groups = draw(st.sampled_from([1, 1, 2, 4]))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride, dilation, padding, size = (
        each(1, 3),
        each(1, 3),
        each(1, 2),
        each(0, most_padding),
        each(1, 5 if n < 3 else 4),
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    options = {
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": dilation,
        "stride": stride,
        "padding": padding,
    }
    if kind in TRANSPOSED:
        options["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        ends = zip(size, stride, padding, reach, options["output_padding"], strict=True)
        assume(all((m - 1) * s - 2 * p + r + o > 0 for m, s, p, r, o in ends))
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "replicate", "circular"]))
        assume(
            options["padding_mode"] != "circular"
            or all(p <= m for p, m in zip(padding, size, strict=True))
        )
        assume(all(m + 2 * p >= r for m, p, r in zip(size, padding, reach, strict=True)))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = [] if draw(st.integers(0, 5)) == 0 else [draw(st.integers(1, 4))]
    return kind(*channels, kernel, **options).double(), torch.randn(
        *batch, channels[0], *size
    ).double()


def units_first(layer, z):
    """A convolution's output as (groups, rows, n)."""
    z = z if z.dim() == layer.dimensions + 2 else z.unsqueeze(0)
    return z.transpose(0, 1).reshape(layer.groups, layer.rows, -1)


def whole_patches(layer, x):
    patches = torch.cat(list(layer.patches(x)), dim=1)
    return (
        patches
        if layer.bias is None
        else torch.cat([patches, torch.ones_like(patches[..., :1])], dim=-1)
    )


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_a_convolution_is_linear_on_its_patches(case):
    module, x = case
    layer = as_layer("conv", module)
    patches = whole_patches(layer, x)
    torch.testing.assert_close(layer.matrix() @ patches.mT, units_first(layer, module(x)))
    assert layer.vectors(x) == patches.shape[1]


@settings(max_examples=40, deadline=None)
@given(convolutions())
def test_the_running_convolution_is_off_by_what_the_solution_says(case):
    module, x = case
    assume(module.weight.numel() > 1)  # half of one weight is all of it, which is refused
    result = lobs.prune(
        module, [x], lobs.Sparsity(0.5), progress=False, numerics=lobs.Numerics(damping=1e-06)
    )
    with torch.no_grad():
        off = (module(x) - result.model(x)).square()
    positions = off.numel() // module.out_channels
    torch.testing.assert_close(
        result.solutions["model"].error, float(off.sum()) / positions, rtol=1e-8, atol=1e-12
    )
    assert result.layers[0].samples == positions
    assert int((~result.masks["weight"]).sum()) == lobs.Sparsity(0.5).count(module.weight.numel())
    assert bool((result.model.weight[~result.masks["weight"]] == 0).all())


@settings(max_examples=15, deadline=None)
@given(convolutions())
def test_the_streamed_moment_is_the_hessian_of_the_running_convolution(case):
    module, x = case
    layer = as_layer("conv", module)
    x = x if x.dim() == layer.dimensions + 2 else x.unsqueeze(0)
    moments = lobs.collect_moments(module, [x[:1], x[1:]] if len(x) > 1 else [x])["model"]
    dense = module(x).detach()

    def error(weight):
        return (
            functional_call(module, {"weight": weight}, (x,)) - dense
        ).square().sum() / moments.count

    numbers = torch.arange(module.weight.numel()).reshape(module.weight.shape)
    found = hessian(error)(module.weight.detach()).detach().reshape(numbers.numel(), -1).clone()
    for g, rows in enumerate(layer.unfolded(numbers)):
        for row in rows:
            torch.testing.assert_close(
                found[row][:, row], 2 * moments.moment[g, : layer.columns, : layer.columns]
            )
            found[row.unsqueeze(1), row] = 0
    assert float(found.abs().max()) < 1e-9  # rows have nothing to do with one another


@settings(max_examples=30, deadline=None)
@given(convolutions())
def test_summing_by_unit_is_the_gradient_of_a_bias(case):
    module, x = case
    layer = as_layer("conv", module)
    z = module(x).detach()
    weights = torch.randn_like(z)
    bias = torch.zeros(module.out_channels, dtype=z.dtype, requires_grad=True)
    shaped = bias.reshape(-1, *[1] * layer.dimensions)
    (expected,) = torch.autograd.grad(((z + shaped) * weights).sum(), bias)
    torch.testing.assert_close(layer.by_unit(weights), expected.reshape(layer.groups, layer.rows))


@settings(max_examples=30, deadline=None)
@given(convolutions())
def test_write_is_the_inverse_of_matrix(case):
    module, _ = case
    layer = as_layer("conv", module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    matrix = layer.matrix()
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(torch.nan)
    layer.write(matrix)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@settings(max_examples=20, deadline=None)
@given(convolutions(TRANSPOSED, most_padding=0))
def test_a_transposed_weight_is_used_once_per_patch_and_stride(case):
    module, x = case
    layer = as_layer("conv", module)
    x = x if x.dim() == layer.dimensions + 2 else x.unsqueeze(0)
    patches = torch.cat(list(layer.patches(torch.ones_like(x))), dim=1)
    # With nothing cropped a kernel position meets every input element once.
    assert bool((patches.sum(dim=1) == x[0, 0].numel() * len(x)).all())
    assert layer.uses_per_patch == 1 / torch.Size(module.stride).numel()


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_an_output_size_that_patches_cannot_know_is_refused(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = kind(2, 2, 3, stride=2)

        def forward(self, x):
            return self.up(output_size=[more + 2 * n for n in x.shape[2:]], input=x)

    n, more = int(kind.__name__[-2]), 1
    x = torch.randn(1, 2, *[3] * n)
    assert lobs.collect_moments(Net(), [x])["up"].count == 7**n  # what it would be anyway
    more = 2
    with pytest.raises(
        lobs.LobsError, match=r"layer 'up' was called with output_size=\(8.*Set output_padding"
    ):
        lobs.collect_moments(Net(), [x])


@pytest.mark.parametrize(
    ("module", "wrong"), [(nn.Conv1d(2, 2, 3), (2, 3, 5)), (nn.ConvTranspose3d(2, 2, 3), (2, 4, 4))]
)
def test_an_input_of_the_wrong_shape_is_refused(module, wrong):
    with pytest.raises(
        lobs.LobsError, match="layer 'model' takes floating-point inputs of 2 channels"
    ):
        lobs.collect_moments(module, [torch.randn(wrong)])


def test_a_thousand_groups_are_as_one_by_one():
    conv = nn.Conv2d(300, 300, 3, padding=1, groups=300)
    x = torch.randn(2, 300, 6, 6)
    result = lobs.prune(conv, [x], lobs.Sparsity(0.4), progress=False)
    moment = lobs.collect_moments(conv, [x])["model"].moment
    for g in (0, 17, 299):
        alone = nn.Conv2d(1, 1, 3, padding=1)
        alone.load_state_dict({"weight": conv.weight[g : g + 1], "bias": conv.bias[g : g + 1]})
        torch.testing.assert_close(
            moment[g], lobs.collect_moments(alone, [x[:, g : g + 1]])["model"].moment[0]
        )
    with torch.no_grad():
        off = float((conv(x) - result.model(x)).square().sum()) / 72
    torch.testing.assert_close(result.solutions["model"].error, off, rtol=1e-4, atol=0)


def test_layers_are_found_inside_containers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleDict(
                {"a": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), "b": nn.Linear(3, 3)}
            )

        def forward(self, x):
            return self.branches["b"](x) + sum(layer(x) for layer in self.branches["a"])

    names = [layer.name for layer in find_layers(Net())]
    assert names == ["branches.a.0", "branches.a.1", "branches.b"]
    result = lobs.prune(Net(), [torch.randn(40, 3)], lobs.Sparsity(0.5), progress=False)
    assert {*result.masks} == {f"{name}.weight" for name in names}
