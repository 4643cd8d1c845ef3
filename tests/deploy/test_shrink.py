from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs import Structured
from lobs.calibration.batch_norm import find_norms
from lobs.deploy.shrink import fit_to


def trained_like(model, batches):
    """Give batch norms statistics that fit, as training would."""
    for norm in find_norms(model).values():
        norm.momentum = 0.3
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
    model.train()
    with torch.no_grad():
        for _ in range(30):
            for x in batches:
                model(x)
    return model.eval()


class Residual(nn.Module):
    """A bottleneck of ResNet-50's kind."""

    def __init__(self, inside, middle, outside, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = (
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
            nn.BatchNorm2d(middle),
        )
        self.conv3, self.bn3 = nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        same = inside == outside and stride == 1
        self.down = (
            None
            if same
            else nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(Residual(8, 6, 16), Residual(16, 6, 16), Residual(16, 8, 24, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 8, 3)
        self.c, self.d = nn.Linear(8 * 4, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = torch.tanh(self.b(x))
        x = x.view(x.size(0), -1)
        return self.d(F.gelu(self.c(x)))


def chain():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 10, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(10 * 4, 12), nn.BatchNorm1d(12), nn.LeakyReLU(), nn.Dropout(0.5),
        nn.Linear(12, 4),
    )  # fmt: skip


NETS = {
    "chain": (chain, (3, 14, 14)),
    "functional": (Functional, (2, 10, 10)),
    "resnet": (ResNet, (3, 32, 32)),
}


def network(kind):
    build, shape = NETS[kind]
    torch.manual_seed(0)
    batches = [torch.randn(24, *shape) + 0.3 for _ in range(3)]
    return trained_like(build(), batches), batches


def same(a, b, batches):
    with torch.no_grad():
        return all(
            float((a(x) - b(x)).abs().max()) <= 1e-5 * max(1.0, float(a(x).abs().max()))
            for x in batches
        )


@pytest.mark.parametrize("what", ["units", "inputs"])
@pytest.mark.parametrize("kind", NETS)
def test_the_shrunk_network_computes_what_the_pruned_one_does(kind, what):
    model, batches = network(kind)
    pruned = lobs.prune(model, batches, Structured(0.5, what), progress=False).model
    before = {k: v.clone() for k, v in pruned.state_dict().items()}
    smaller, report = lobs.shrink(pruned, batches[0][:1])
    assert same(pruned, smaller, batches)
    assert report.after < 0.8 * report.before == 0.8 * sum(p.numel() for p in pruned.parameters())
    assert report.after == sum(p.numel() for p in smaller.parameters())
    assert all(torch.equal(before[k], v) for k, v in pruned.state_dict().items())


def test_units_of_a_chain_all_go_with_their_constants_folded():
    model, batches = network("chain")
    pruned = lobs.prune(model, batches, Structured(0.5), progress=False).model
    smaller, report = lobs.shrink(pruned, batches[0])
    assert (
        report.channels == {"0": (8, 4), "4": (10, 5), "8": (12, 6), "12": (4, 4)}
        and not report.stayed
    )
    assert smaller[8].in_features == 5 * 4 and smaller[1].num_features == 4
    assert "8: 12 → 6 units" in str(report)


def test_random_empty_units_with_biases_are_folded_exactly():
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(6, 9),
            nn.ReLU(),
            nn.Linear(9, 7),
            nn.Tanh(),
            nn.Linear(7, 7),
            nn.ELU(),
            nn.Linear(7, 2),
        )
        with torch.no_grad():
            for layer in (0, 2, 4):
                model[layer].weight[torch.rand(len(model[layer].weight)) < 0.5] = 0
        smaller, report = lobs.shrink(model, torch.randn(1, 6))
        assert same(model, smaller, [torch.randn(50, 6)]) and not report.stayed


def test_a_residual_sum_loses_only_what_is_empty_on_both_sides():
    model, batches = network("resnet")
    block = model.blocks[0]
    with torch.no_grad():
        for conv, norm, units in (
            (block.conv3, block.bn3, [1, 2, 3]),
            (block.down[0], block.down[1], [2, 3, 4]),
        ):
            conv.weight[units] = 0
            norm.running_mean[units] = 0
            norm.bias[units] = 0
        model.blocks[1].conv3.weight[[2, 5]] = 0
        model.blocks[1].bn3.running_mean[[2, 5]] = 0
        model.blocks[1].bn3.bias[[2, 5]] = 0
    smaller, report = lobs.shrink(model, batches[0])
    assert (
        report.channels["blocks.0.conv3"]
        == report.channels["blocks.0.down.0"]
        == report.channels["blocks.1.conv3"]
        == (16, 15)
    )
    assert same(model, smaller, batches)
    assert any("not empty everywhere" in why for why in report.stayed)


def test_a_constant_that_a_padded_convolution_reads_stays_and_is_explained():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].bias[0], model[0].bias[1] = 1.0, -1.0  # after ReLU: 1, and nothing
    x = torch.randn(3, 1, 9, 9)
    smaller, report = lobs.shrink(model, x)
    assert report.channels["0"] == (4, 3) and same(model, smaller, [x])
    assert report.stayed == ("1 units of 0: constant but not zero, and '2' pads with zeros",)


def test_channels_that_nothing_reads_go_though_they_are_alive():
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1))
    with torch.no_grad():
        model[2].weight[:, [0, 3]] = 0
    x = torch.randn(3, 1, 9, 9)
    smaller, report = lobs.shrink(model, x)
    assert report.channels["0"] == (6, 4) and same(model, smaller, [x])


def test_what_goes_may_empty_what_follows():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[2].weight[1, 1:] = 0  # reads the empty unit alone
    smaller, report = lobs.shrink(model, torch.randn(1, 3))
    assert report.channels == {"0": (4, 3), "2": (4, 3), "4": (2, 2)} and same(
        model, smaller, [torch.randn(20, 3)]
    )


def test_a_layer_that_is_empty_keeps_one_unit():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.zero_()
    smaller, report = lobs.shrink(model, torch.randn(1, 3))
    assert report.channels["0"] == (4, 1) and same(model, smaller, [torch.randn(20, 3)])


def test_outputs_and_unknown_steps_stay_and_are_explained():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.PixelShuffle(2), nn.Conv2d(1, 3, 1))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[2].weight[1] = 0
    smaller, report = lobs.shrink(model, torch.randn(1, 1, 4, 4))
    assert report.after == report.before and same(model, smaller, [torch.randn(2, 1, 4, 4)])
    assert any("PixelShuffle" in why for why in report.stayed) and any(
        "network returns it" in why for why in report.stayed
    )


def test_grouped_convolutions_and_modules_called_twice_are_left_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.c(self.b(self.b(self.a(x))))

    grouped = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    )
    for model, x in ((Twice(), torch.randn(5, 4)), (grouped, torch.randn(2, 2, 6, 6))):
        with torch.no_grad():
            next(model.parameters())[0] = 0
        smaller, report = lobs.shrink(model, x)
        assert same(model, smaller, [x]) and report.stayed


def test_a_network_that_cannot_be_traced_is_refused_in_words():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(lobs.LobsError, match="could not be traced"):
        lobs.shrink(Branching(), torch.randn(1, 2))


def test_a_fresh_network_takes_the_shrunk_ones_sizes():
    model, batches = network("resnet")
    pruned = lobs.prune(model, batches, Structured(0.5), progress=False).model
    smaller, _ = lobs.shrink(pruned, batches[0])
    assert same(smaller, fit_to(ResNet(), smaller.state_dict()).eval(), batches)
    with pytest.raises(lobs.LobsError, match="do not fit"):
        fit_to(nn.Sequential(nn.Linear(2, 2)), smaller.state_dict())


def halved():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[:3] = 0
    return model


class Named(nn.Module):
    """Takes its input by name, beside an optional argument."""

    def __init__(self):
        super().__init__()
        self.net = halved()

    def forward(self, pixels, mask=None):
        h = self.net(pixels)
        return h if mask is None else h * mask


def test_shrink_takes_the_batches_that_prune_takes():
    x, y = torch.randn(5, 4), torch.zeros(5)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    for model, batches in (
        (halved(), x),
        (halved(), [x]),
        (halved(), [(x, y)]),
        (halved(), [[x, y]]),
        (halved(), (b for b in [x])),
        (halved(), data),
        (Named(), x),
        (Named(), [{"pixels": x}]),
        (Named(), {"pixels": x}),
        (Named(), [{"pixels": x, "mask": torch.ones(5, 2)}]),
    ):
        lobs.prune(model, [x], lobs.Sparsity(0.1), progress=False)
        smaller, report = lobs.shrink(model, batches)
        first = "net.0" if isinstance(model, Named) else "0"
        assert report.channels[first] == (6, 3) and same(model, smaller, [x])


@pytest.mark.parametrize("batches", [[], ["text"], [()], 3, "text"])
def test_batches_that_say_nothing_of_shapes_are_refused(batches):
    with pytest.raises(lobs.LobsError, match="batch"):
        lobs.shrink(halved(), batches)


class Wired(nn.Module):
    """Two layers whose first units are empty, joined as the test says."""

    def __init__(self, join):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.relu, self.join = nn.ReLU(inplace=True), join
        with torch.no_grad():
            for layer in (self.a, self.b):
                layer.weight[:2], layer.bias[:2] = 0, -1

    def forward(self, x):
        return self.c(self.join(self, x))


def through_a_changed_input(net, x):
    x = net.a(x)
    return net.b(net.relu(x)) + x


def through_a_changed_view(net, x):
    x = net.a(x)
    return net.b(x.view(x.shape[0], -1).relu_()) + x


def through_a_sum_in_place(net, x):
    x = net.a(x)
    y = net.b(x)
    x += y
    return torch.tanh(x) + x


@pytest.mark.parametrize(
    "join",
    [
        through_a_changed_input,
        through_a_changed_view,
        through_a_sum_in_place,
        lambda net, x: torch.add(net.a(x), net.b(x), alpha=2),
        lambda net, x: net.a(x).add(net.b(x), alpha=-1),
        lambda net, x: net.a(x) + net.b(x),
        lambda net, x: F.softshrink(net.a(x)) + F.hardtanh(net.b(x), -0.5, 0.5),
        lambda net, x: net.a(x) * net.b(x).shape[1],
        lambda net, x: (y := net.b(x)).relu() + net.a(x) * y.shape[1],
        lambda net, x: net.a(x).view(-1, 4),
        lambda net, x: net.a(x).view(x.shape[0] * 2, -1).view(-1, 4),
        lambda net, x: F.dropout(net.a(x), 0.5, False) + F.dropout(net.b(x), training=False),
    ],
)
def test_however_layers_are_joined_the_outputs_stay(join):
    model, x = Wired(join), torch.randn(6, 4)
    smaller, _ = lobs.shrink(model, x)
    assert same(model, smaller, [x, torch.randn(9, 4)])


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2, divisor_override=1),
        nn.AvgPool2d(3, 1, 1),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AdaptiveMaxPool2d(2),
        nn.Tanhshrink(),
        nn.LogSigmoid(),
    ],
    ids=str,
)
def test_constants_go_through_poolings_and_activations_exactly(pool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), pool, nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model[0].weight[:2] = 0
    x = torch.randn(3, 2, 6, 6)
    smaller, _ = lobs.shrink(model, x)
    assert same(model, smaller, [x])
