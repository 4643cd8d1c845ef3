from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lobs.errors import UnsupportedLayerError
from lobs.layers import Conv2dLayer, LinearLayer, base, find_layers

CONVOLUTIONS = {
    "plain": {},
    "stride": {"stride": (2, 3)},
    "padding": {"padding": (1, 2)},
    "dilation": {"dilation": (2, 1), "padding": 2},
    "same": {"padding": "same"},
    "same, even kernel": {"padding": "same", "kernel_size": (4, 2)},
    "same, dilated": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "replicate": {"padding": (2, 1), "padding_mode": "replicate"},
    "circular": {"padding": (1, 2), "padding_mode": "circular"},
    "groups": {"groups": 2},
    "groups, strided and padded": {"groups": 2, "stride": 2, "padding": 1},
    "depthwise": {"groups": 4, "out_channels": 8},
    "no bias": {"bias": False},
    "1x1": {"kernel_size": 1},
}


def convolution(**settings):
    settings = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2)} | settings
    return nn.Conv2d(**settings).double()


def by_matrix(layer, x):
    """The layer's output, computed as its matrix times its patches: (groups, rows, n)."""
    patches = torch.cat(list(layer.patches(x)), dim=1)
    matrix = layer.matrix()
    if layer.bias is not None:
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], dim=-1)
    return matrix @ patches.mT


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution_is_linear_on_its_patches(kind, monkeypatch):
    conv = convolution(**CONVOLUTIONS[kind])
    layer = Conv2dLayer("conv", conv)
    x = torch.randn(5, 4, 9, 8, dtype=torch.float64)
    expected = conv(x).transpose(0, 1).reshape(layer.groups, layer.rows, -1)
    for elements in (2**21, 1000, 1):  # whole batches, some images, single lines at a time
        monkeypatch.setattr("lobs.layers.base.PIECE_ELEMENTS", elements)
        pieces = by_matrix(layer, x)
        if elements == 1:  # line by line, images outermost: same order
            assert len(list(layer.patches(x))) >= len(x)
        torch.testing.assert_close(pieces, expected)


def test_patch_order_is_that_of_the_flattened_kernel():
    conv = convolution()
    patches = torch.cat(
        list(Conv2dLayer("conv", conv).patches(x := torch.randn(1, 4, 9, 8).double())), dim=1
    )
    torch.testing.assert_close(patches[0], F.unfold(x, (3, 2))[0].T)


def test_unbatched_image_is_a_batch_of_one():
    layer = Conv2dLayer("conv", convolution())
    x = torch.randn(4, 9, 8).double()
    torch.testing.assert_close(next(layer.patches(x)), next(layer.patches(x.unsqueeze(0))))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7)])
def test_linear_takes_any_leading_shape(shape):
    linear = nn.Linear(7, 5).double()
    x = torch.randn(shape).double()
    torch.testing.assert_close(
        by_matrix(LinearLayer("fc", linear), x)[0].T, linear(x).reshape(-1, 5)
    )


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_write_is_the_inverse_of_matrix(kind):
    source, target = convolution(**CONVOLUTIONS[kind]), convolution(**CONVOLUTIONS[kind])
    Conv2dLayer("b", target).write(Conv2dLayer("a", source).matrix())
    assert all(
        torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True)
    )


def test_matrix_is_a_copy():
    linear = nn.Linear(3, 2, bias=False)
    LinearLayer("fc", linear).matrix().zero_()
    assert bool((linear.weight != 0).any())


def test_layers_are_chosen_by_name_and_glob():
    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    )
    assert [x.name for x in find_layers(model)] == ["0", "2.0", "2.1"]
    assert [x.name for x in find_layers(model, "2.*")] == ["2.0", "2.1"]
    assert [x.name for x in find_layers(model, skip=["0", "2.1"])] == ["2.0"]
    assert [x.name for x in find_layers(nn.Linear(2, 2))] == ["model"]
    with pytest.raises(UnsupportedLayerError, match="'nope', which matches no prunable layer"):
        find_layers(model, "nope")
    with pytest.raises(UnsupportedLayerError, match="no layer to prune"):
        find_layers(nn.ReLU())


def test_tied_biases_and_shared_memory_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    with pytest.raises(UnsupportedLayerError, match=r"its bias is shared by 0.bias, 1.bias"):
        find_layers(model)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedLayerError, match="its weight is shared"):
        find_layers(model)


def test_a_subclass_with_its_own_forward_is_refused():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    with pytest.raises(
        UnsupportedLayerError, match="Standardised computes its output in its own way"
    ):
        find_layers(nn.Sequential(Standardised(1, 2, 3)))


def test_parametrised_weights_are_refused():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedLayerError, match="parametrised"):
        find_layers(model)


def test_weights_under_torch_prune_are_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    prune.l1_unstructured(model[0], "weight", 2)
    with pytest.raises(UnsupportedLayerError, match=r"prune\.remove"):
        find_layers(model)


def test_meta_and_lazy_weights_are_refused():
    with pytest.raises(UnsupportedLayerError, match="meta device"):
        find_layers(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedLayerError, match="no shape yet"):
        find_layers(nn.LazyLinear(2))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(6, 4),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.MultiheadAttention(4, 2),
    ],
)
def test_a_value_for_each_column_stands_at_all_weights_of_the_column(module):
    for layer in find_layers(nn.ModuleDict({"one": module})):
        values = torch.rand(layer.groups, layer.columns)
        ((name, spread),) = layer.by_column(values).items()
        before = layer.unfolded(layer.weight.detach()).clone()
        parameter = module.get_parameter(name.removeprefix("one."))
        others = torch.ones(len(parameter), dtype=torch.bool)
        others[layer.weight_part.start : layer.weight_part.stop] = False
        assert bool((spread[others] == 1).all())
        with torch.no_grad():
            parameter.mul_(spread)
        torch.testing.assert_close(
            layer.unfolded(layer.weight.detach()), before * values.unsqueeze(1)
        )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sampled_positions_are_windows_of_all_places(name):
    """Of all starts and images, every row and every column is taken equally often."""
    conv = convolution(**CONVOLUTIONS[name])
    layer = find_layers(nn.Sequential(conv))[0]
    x = torch.randn(6, 4, 57, 82, dtype=torch.float64)
    windows = layer.windows(x)
    high, wide = windows.shape[2:4]
    assert min(high, wide) >= 24
    whole = torch.cat(list(layer.patches(x)), dim=1).unflatten(1, (6, high, wide))
    for step in (2, 3):
        rows, columns = torch.zeros(high), torch.zeros(wide)
        for start in range(step):
            found = torch.cat(list(layer.sampled(x, step, start)), dim=1)
            wanted = []
            for turn in range(step):
                top, left = (start + turn) % step, (start - turn) % step
                wanted.append(whole[:, turn::step, top::step, left::step].flatten(1, 3))
                rows[top::step] += 1
                columns[left::step] += 1
            torch.testing.assert_close(found, torch.cat(wanted, dim=1))
        assert len(set(rows.tolist())) == len(set(columns.tolist())) == 1


def test_sampled_positions_of_many_images_come_in_few_pieces():
    layer = find_layers(nn.Sequential(convolution()))[0]
    x = torch.randn(6, 4, 49, 49, dtype=torch.float64)
    assert [p.shape[1] for p in layer.sampled(x, 3, 0)] == [
        sum(p.shape[1] for p in layer._taken(x, 3, 0))
    ]


def test_joined_pieces_hold_the_same_vectors_and_at_most_so_many_rows():
    pieces = [torch.randn(2, n, 3) for n in (5, 1, 4, 9, 2, 2)]
    found = list(base.joined(pieces, 8))
    assert [p.shape[1] for p in found] == [6, 4, 9, 4]
    assert torch.equal(torch.cat(found, dim=1), torch.cat(pieces, dim=1))


def test_small_images_keep_all_positions():
    layer = find_layers(nn.Sequential(convolution()))[0]
    x = torch.randn(2, 4, 15, 15, dtype=torch.float64)
    assert sum(p.shape[1] for p in layer.sampled(x, 100, 7)) == layer.vectors(x)


def test_positions_are_spared_only_where_there_are_enough_others():
    layer = find_layers(nn.Sequential(convolution()))[0]
    assert layer.spacing(0, 100) == layer.spacing(399, 100) == 1
    assert layer.spacing(400, 100) == 2 and layer.spacing(10_000, 100) == 10
    linear = find_layers(nn.Sequential(nn.Linear(3, 3)))[0]
    assert linear.spacing(10**9, 1) == 1
