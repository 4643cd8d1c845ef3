from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.certificate.bound import Link, compose


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
        conv = nn.Conv2d(
            channels,
            width,
            kernel,
            stride=pick(1, 2),
            padding=pick(0, 1),
            groups=groups,
            bias=pick(True, False),
        )
        conv.padding_mode = "zeros"
        norm = nn.BatchNorm2d(width)
        nn.init.uniform_(norm.weight, -2, 2)
        norm.running_var.uniform_(0.3, 2)
        steps += [conv, pick(norm, nn.Identity()), activation()]
        channels = width
        size = (size + 2 * conv.padding[0] - kernel) // conv.stride[0] + 1
        if size > 3:
            pool = pick(
                nn.MaxPool2d(2),
                nn.MaxPool2d(3, stride=1),
                nn.AvgPool2d(2),
                nn.AvgPool2d(3, stride=2, padding=1),
            )
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
    solver = ("greedy", "lobs", "magnitude", "random")[seed % 4]
    inputs = "pruned" if seed % 3 == 0 else "dense"
    result = lobs.prune(
        model,
        [x[:5], x[5:]],
        lobs.Sparsity(0.2 + 0.1 * (seed % 7)),
        solver=solver,
        inputs=inputs,
        numerics=lobs.Numerics(batch_norm=False),
        progress=False,
    )
    certificate = result.certificate
    assert (
        certificate.reason == ""
        and certificate.measured is not None
        and certificate.bound is not None
    )
    assert certificate.measured <= certificate.bound * (1 + 1e-5) + 1e-6
    assert certificate.bound <= certificate.frobenius_bound * (1 + 1e-9)
    assert sum(certificate.contributions.values()) == pytest.approx(certificate.bound)


def test_one_layer_is_bounded_by_exactly_what_happens():
    model = nn.Linear(6, 4)
    result = lobs.prune(model, [torch.randn(50, 6)], lobs.Sparsity(0.5), progress=False)
    assert result.certificate.bound == pytest.approx(result.certificate.measured, rel=1e-4)


def test_rounding_does_not_hide_an_error_from_the_certificate():
    # Deep and shrinking: true layer errors are far below what float32 moments resolve, yet the
    # bound must cover them.
    torch.manual_seed(0)
    layers = [step for _ in range(8) for step in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers)
    x = torch.randn(32, 8, 8, 8)
    result = lobs.prune(model, [x], lobs.Sparsity(0.3), progress=False)
    dense, pruned, y = (
        copy.deepcopy(model).double(),
        copy.deepcopy(result.model).double(),
        x.double(),
    )
    for name, solution in result.solutions.items():
        with torch.no_grad():
            true = float(
                (dense[int(name)](y) - pruned[int(name)](y)).square().sum() / y[:, 0].numel()
            )
            y = torch.relu(dense[int(name)](y))
        assert abs(solution.error - true) <= 1e-6 * solution.energy
        assert true == 0 or name in result.certificate.contributions
    assert result.certificate.bound >= result.certificate.measured


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes_are_counted_not_assumed(padding_mode):
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Conv2d(2, 3, 3, padding=2, padding_mode=padding_mode), nn.Flatten()
    )
    result = lobs.prune(model, [torch.randn(20, 2, 6, 6)], lobs.Sparsity(0.9), progress=False)
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

    result = lobs.prune(Net(), [torch.randn(10, 1, 8, 8)], lobs.Sparsity(0.5), progress=False)
    assert (
        result.certificate.bound is not None
        and result.certificate.bound >= result.certificate.measured
    )


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


def ones(*modules):
    """Convolutions of ones pass everything on, so that whatever a pooling can stretch shows."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), *modules)
    nn.init.ones_(net[0].weight)
    return net


@pytest.mark.parametrize(
    ("pool", "size", "place"),
    [
        (nn.MaxPool2d(3, 2, ceil_mode=True), 4, (2, 2)),
        (nn.AvgPool2d(3, 3, ceil_mode=True), 4, (3, 3)),
        (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), 4, (0, 0)),
        (nn.AdaptiveAvgPool2d(3), 4, (1, 1)),
        (nn.AvgPool2d(2, divisor_override=1), 4, (0, 0)),
        (nn.MaxPool2d(2, stride=1, padding=1), 4, (1, 1)),
    ],
)
def test_odd_poolings_are_covered(pool, size, place):
    x = torch.zeros(1, 1, size, size)
    x[0, 0, place[0], place[1]] = 1
    dense = ones(pool)
    empty = copy.deepcopy(dense)
    nn.init.zeros_(empty[0].weight)
    certificate = lobs.certify(dense, empty, [x])
    assert certificate.bound is not None and certificate.measured <= certificate.bound * (1 + 1e-5)


class Moody(nn.Module):
    """Behaves otherwise in training."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.b(F.dropout(torch.relu(self.a(x)), 0.5, self.training))
        return y if self.training else y * 100


def test_a_network_in_training_mode_is_certified_for_evaluation():
    model = Moody().train()
    certificate = lobs.prune(
        model, [torch.randn(5, 8)] * 3, lobs.Sparsity(0.5), solver="magnitude", progress=False
    ).certificate
    assert certificate.bound is not None and certificate.measured <= certificate.bound
    assert model.training


def test_dropout_that_stays_on_is_refused():
    class AlwaysOn(Moody):
        def forward(self, x):
            return self.b(F.dropout(torch.relu(self.a(x)), 0.5))

    certificate = lobs.prune(
        AlwaysOn(), [torch.randn(5, 8)], lobs.Sparsity(0.1), progress=False
    ).certificate
    assert certificate.bound is None and "dropout" in certificate.reason


@pytest.mark.parametrize("inputs", ["dense", "pruned"])
def test_inputs_of_several_sizes_are_refused(inputs):
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3))
    x = [torch.ones(1, 1, 3, 3), torch.ones(1, 1, 20, 20)]
    certificate = lobs.prune(
        model, x, lobs.Sparsity(0.5), inputs=inputs, progress=False
    ).certificate
    assert certificate.bound is None and "2 different shapes" in certificate.reason


@pytest.mark.parametrize(
    "activation", [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ELU(2.0), nn.Softplus()]
)
def test_lipschitz_constants_are_not_too_small(activation):
    from lobs.certificate.lipschitz import _gain
    from lobs.layers.operations import step_of

    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation(x).sum(), x)
    node = torch.fx.Graph().call_module("activation")
    constant = _gain(step_of(node, activation), x.shape)
    assert float(slope.abs().max()) <= constant <= float(slope.abs().max()) * 1.01 + 1e-9


def test_inference_mode_does_not_lose_the_certificate():
    with torch.inference_mode():
        result = lobs.prune(
            ones(nn.Flatten()), [torch.randn(4, 1, 3, 3)], lobs.NByM({"*": 1}, 2), progress=False
        )
    assert result.certificate.bound is not None


def test_an_iterable_that_can_be_read_once_is_not_measured_as_zero():
    class Once:
        def __init__(self):
            self.items = iter([torch.randn(5, 8)])

        def __iter__(self):
            return self.items

    certificate = lobs.prune(Moody(), Once(), lobs.ErrorBudget(0.5), progress=False).certificate
    assert certificate.measured is None
    with pytest.raises(lobs.LobsError, match="read only once"):
        lobs.prune(Moody(), Once(), lobs.Sparsity(0.5, scope="layer"), progress=False)


def test_certify_compares_any_two_networks_and_measures_held_out_inputs():
    dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, new = torch.randn(200, 6), torch.randn(100, 6)
    result = lobs.prune(
        dense, [x], lobs.Sparsity(0.5), inputs="dense", held_out=[new], progress=False
    )
    again = lobs.certify(dense, result.model, [x], held_out=[new])
    assert again.bound == pytest.approx(result.certificate.bound, rel=1e-6)
    assert again.measured == pytest.approx(result.certificate.measured)
    assert (
        again.held_out == pytest.approx(result.certificate.held_out)
        and again.held_out != again.measured
    )
    assert "on held-out inputs" in str(again)
    retrained = copy.deepcopy(result.model)
    nn.init.normal_(retrained[0].weight)
    moved = lobs.certify(dense, retrained, [x])
    assert moved.measured <= moved.bound


@pytest.mark.parametrize(
    ("model", "batch", "reason"),
    [
        (Branching(), torch.rand(8, 5), "could not be traced"),
        (Twice(), torch.randn(8, 5), "more than once"),
        (Keywords(), {"x": torch.randn(8, 5)}, "keyword"),
        (
            nn.Sequential(nn.Linear(5, 5), nn.CELU()),
            torch.randn(8, 5),
            "no Lipschitz constant is known for '1' .CELU",
        ),
        (nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), torch.randn(8, 5), "LayerNorm"),
    ],
)
def test_where_the_theorem_does_not_apply_it_refuses_with_a_reason(model, batch, reason):
    certificate = lobs.prune(model, [batch], lobs.Sparsity(0.5), progress=False).certificate
    assert certificate.bound is None
    assert certificate.measured is not None and certificate.measured > 0
    assert re.search(reason, certificate.reason)
    assert "no bound" in str(certificate)


def test_compose_folds_gains_and_errors():
    certificate = compose([Link("a", 2, 3, 0.1), Link("relu", 0.5, 0.5), Link("b", 4, 5, 0.2)])
    assert certificate.bound == pytest.approx(0.1 * 0.5 * 4 + 0.2)
    assert certificate.frobenius_bound == pytest.approx(0.1 * 0.5 * 5 + 0.2)
    assert certificate.contributions == pytest.approx({"a": 0.2, "b": 0.2})


def test_held_out_inputs_are_batches_and_networks_of_other_shapes_are_refused():
    model, x = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(20, 5)
    with pytest.raises(lobs.LobsError, match=r"held_out is a Tensor: .* one tensor x is \[x\]"):
        lobs.prune(model, [x], lobs.Sparsity(0.5), held_out=x, progress=False)
    with pytest.raises(lobs.LobsError, match="held_out is a Tensor"):
        lobs.certify(model, model, [x], held_out=x)
    smaller = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(
        lobs.LobsError, match=r"layer '0' is \(4, 5\) in one network and \(3, 5\) in the other"
    ):
        lobs.certify(model, smaller, [x])


def test_held_out_inputs_that_say_nothing_are_told_of():
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(40, 6)
    for held_out, words in (
        ([], "held_out has no samples"),
        ([torch.full((2, 6), torch.nan)], "outputs there are not finite"),
        ([torch.randn(3, 7)], "held_out could not be measured: running the network"),
        (
            (1 / 0 for _ in range(2)),
            "held_out could not be measured: reading held_out batch 0 raised ZeroDivisionError",
        ),
    ):
        with pytest.warns(lobs.NumericalWarning, match=words):
            lobs.prune(model, [x], lobs.Sparsity(0.5), held_out=held_out, progress=False)
