from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import hessian

import lobs
from lobs import LobsError, NumericalWarning, Sparsity, collect_moments, prune
from lobs.calibration.moments import Moments
from lobs.layers import as_layer


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 6)
    ).double()


def test_twice_the_moment_is_the_hessian_of_the_layer_error():
    linear = nn.Linear(4, 3).double()
    x = torch.randn(20, 4).double()
    psi = collect_moments(linear, [x])["model"].moment[0]
    y = torch.cat([x, torch.ones(20, 1).double()], dim=1)
    row = torch.randn(5).double()

    def error(v):
        return ((y @ (v - row)) ** 2).mean()

    torch.testing.assert_close(2 * psi, hessian(error)(row))


@pytest.mark.parametrize("kind", ["conv", "groups"])
def test_convolution_moment_is_the_hessian_of_the_running_layer(kind):
    conv = nn.Conv2d(
        2, 2, 2, stride=2, padding=1, groups=2 if kind == "groups" else 1, bias=False
    ).double()
    x = torch.randn(3, 2, 5, 5).double()
    moments = collect_moments(conv, [x])["model"]
    dense = conv(x)

    def error(weight):
        out = torch.func.functional_call(conv, {"weight": weight}, (x,))
        return (out - dense).square().sum() / moments.count

    full = hessian(error)(conv.weight.detach()).reshape(2, conv.weight[0].numel(), 2, -1)
    for row in range(2):
        torch.testing.assert_close(
            full[row, :, row], 2 * moments.moment[row if kind == "groups" else 0]
        )
        torch.testing.assert_close(full[row, :, 1 - row], torch.zeros_like(full[row, :, row]))


def test_of_large_images_some_windows_are_summed_and_all_are_counted():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1, groups=1)
    batches = [torch.randn(4, 3, 32, 32) for _ in range(8)]
    whole = collect_moments(conv, batches)
    some = collect_moments(conv, batches, enough=64)
    used = some["model"].count
    assert 64 * 27 <= used < whole["model"].count / 2
    assert some.count("model") == whole.count("model") == 8 * 4 * 32 * 32
    torch.testing.assert_close(some["model"].moment, whole["model"].moment, rtol=0.1, atol=0.08)
    read = Moments.unpacked(some["model"].packed(), bias=True)
    assert (read.count, read.left_out) == (used, 8 * 4 * 32 * 32 - used)


def test_batch_split_and_order_do_not_matter():
    model, x = cnn(), torch.randn(24, 2, 5, 5).double()
    whole = collect_moments(model, [x])
    shuffled = x[torch.randperm(24)]
    parts = collect_moments(model, [shuffled[:1], shuffled[1:10], shuffled[10:]])
    for name in whole:
        torch.testing.assert_close(whole[name].moment, parts[name].moment)
        torch.testing.assert_close(whole[name].mean, parts[name].mean)
        assert whole[name].count == parts[name].count
    assert whole.samples == parts.samples == 24


def test_grouped_convolution_is_independent_layers():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    x = torch.randn(5, 4, 8, 8)
    grouped = collect_moments(conv, [x])["model"].moment
    for g in range(2):
        alone = collect_moments(nn.Conv2d(2, 3, 3), [x[:, 2 * g : 2 * g + 2]])["model"].moment
        torch.testing.assert_close(grouped[g], alone[0])


def test_wide_moments_in_block_rows_are_the_plain_product():
    x = torch.randn(300, 517)
    moments = Moments(1, 517, bias=False)
    moments.add(x.unsqueeze(0))
    torch.testing.assert_close(
        moments.moment[0], (x.double().T @ x.double()) / 300, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(moments.moment, moments.moment.mT)


def test_float32_products_are_added_in_float64():
    # A million ones and a thousandth part each: float32 accumulation would stop counting.
    moments = Moments(1, 1, bias=False)
    for _ in range(64):
        moments.add(torch.full((1, 2**14, 1), 1.001))
    torch.testing.assert_close(float(moments.moment), 1.001**2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict"])
def test_batches_come_in_three_forms(form):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(input=x)

    x = torch.randn(7, 3)
    batch = {"tensor": x, "tuple": (x, torch.zeros(7)), "list": [x, "label"], "dict": {"x": x}}[
        form
    ]
    calibration = collect_moments(Net(), [batch])
    assert calibration.samples == 7 and calibration["fc"].count == 7


def test_a_layer_called_twice_sums_its_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x))

    model, x = Twice(), torch.randn(5, 3)
    with torch.no_grad():
        both = torch.cat([x, model.fc(x)])
    expected = both.T.double() @ both.double() / 10
    torch.testing.assert_close(
        collect_moments(model, [x])["fc"].moment[0, :3, :3], expected, rtol=1e-5, atol=1e-6
    )


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.frozen = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.frozen(self.fc(x))
        if float(x.abs().max()) > 100:
            raise ValueError("too large")
        return y


def test_mode_and_hooks_come_back_even_when_the_model_raises():
    model = Exploding()
    model.train()
    model.frozen.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for batches in ([torch.ones(2, 3)], [torch.ones(2, 3), torch.full((2, 3), 1e3)]):
        try:
            collect_moments(model, batches)
        except LobsError as error:
            assert len(
                batches
            ) == 2 and "batch of shape (2, 3) raised ValueError: too large" in str(error)
            assert isinstance(error.__cause__, ValueError)
        assert model.training and model.fc.training and not model.frozen.training
        assert not model.fc._forward_pre_hooks
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_gradients_are_not_recorded():
    seen = []
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    collect_moments(model, [torch.ones(1, 3)])
    assert seen == [False] and len(model[0]._forward_hooks) == 1


def test_empty_data_is_an_error():
    with pytest.raises(LobsError, match="no calibration samples"):
        collect_moments(nn.Linear(2, 2), [])
    with pytest.raises(LobsError, match="no calibration samples"):
        collect_moments(nn.Linear(2, 2), iter([torch.empty(0, 2)]))


@pytest.mark.parametrize("counts_only", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_activations_name_layer_and_batch(value, counts_only):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    bad = torch.ones(2, 3)
    bad[1, 1] = value
    with pytest.raises(LobsError, match="layer '0': NaN or infinite input in batch 1"):
        collect_moments(model, [torch.ones(2, 3), bad], counts_only=counts_only)


def test_inputs_that_only_their_sum_is_too_much_for_are_counted():
    large = torch.full((4, 3), 3e38)
    assert (
        collect_moments(nn.Sequential(nn.Linear(3, 2)), [large], counts_only=True).count("0") == 4
    )


def test_constant_inputs_are_a_second_bias():
    # A column that never changes is collinear with the constant 1: singular, announced, and deleted
    # for (almost) nothing.
    x = torch.randn(200, 5)
    x[:, 2] = 3.0
    with pytest.warns(NumericalWarning, match="1 of 6 inputs are dead or duplicated"):
        result = prune(nn.Linear(5, 4), [x], Sparsity(0.2), progress=False)
    assert not bool(result.masks["weight"][:, 2].any())
    assert result.layers[0].relative_error < 1e-4 and result.layers[0].damping > 0


def test_a_layer_that_data_never_reaches_is_an_error_with_the_remedy():
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("head", nn.Identity())
    model.head.unused = nn.Linear(3, 3)
    with pytest.raises(LobsError, match=r"'head.unused' was never reached.*skip=\['head.unused'\]"):
        collect_moments(model, [torch.ones(1, 3)])
    with pytest.warns(NumericalWarning, match=r"Left dense: 'head.unused' \(no batch runs it\)"):
        result = prune(model, [torch.randn(20, 3)], Sparsity(0.5), progress=False)
    assert [row.name for row in result.layers] == ["0"] and result.kept == 4
    assert torch.equal(result.model.head.unused.weight, model.head.unused.weight)
    with pytest.raises(LobsError, match=r"'head.unused' was never reached"):
        prune(model, [torch.randn(20, 3)], Sparsity(0.5), layers="*", progress=False)
    assert lobs.forecast(model, [torch.randn(20, 3)], Sparsity(0.5)).seconds > 0


def test_a_batch_of_a_strange_type_is_refused():
    with pytest.raises(LobsError, match="cannot feed a batch of type str"):
        collect_moments(nn.Linear(2, 2), ["hello"])
    with pytest.raises(LobsError, match="empty tuple"):
        collect_moments(nn.Linear(2, 2), [()])


def test_half_precision_activations_are_counted_in_float32():
    layer = as_layer("fc", nn.Linear(3, 2))
    assert layer is not None
    moments = Moments(1, 3, bias=True)
    x = torch.randn(1, 50, 3, dtype=torch.bfloat16)
    moments.add(x)
    torch.testing.assert_close(
        moments.moment[0, :3, :3], (x[0].double().T @ x[0].double()) / 50, rtol=1e-5, atol=1e-6
    )


def test_batches_of_one_form_are_counted_as_the_one_that_ran():
    torch.manual_seed(0)
    net, ran = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), []
    net[0].register_forward_hook(lambda *_: ran.append(1))
    batches = [torch.randn(n, 4) for n in (5, 5, 5, 3, 3, 5, 5)]
    whole = collect_moments(net, batches, counts_only=True)
    assert len(ran) == 7
    ran.clear()
    some = collect_moments(net, batches, counts_only=True, every=100)
    assert len(ran) == 3  # a form for the first time, or again after another one
    assert some.samples == whole.samples == 31
    assert some.outputs == whole.outputs
    assert {n: some.count(n) for n in some} == {n: whole.count(n) for n in whole}


def test_moments_of_some_batches_are_those_of_these_batches():
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    batches = [torch.randn(5, 4) for _ in range(6)]
    some = collect_moments(net, batches, every=3)
    alone = collect_moments(net, [batches[0], batches[3]])
    torch.testing.assert_close(some["model"].moment, alone["model"].moment)
    assert some.samples == some.count("model") == 30


def test_padded_batches_are_never_counted_as_others():
    ran = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, inputs, attention_mask):
            ran.append(1)
            return self.linear(inputs)

    mask = torch.ones(2, 3, dtype=torch.long)
    mask[0, 2] = 0
    full = torch.ones_like(mask)
    for masks in ([mask] * 4, [mask, full, full], [full, mask, full]):
        ran.clear()
        batches = [{"inputs": torch.randn(2, 3, 4), "attention_mask": m} for m in masks]
        seen = collect_moments(Net(), batches, counts_only=True, every=100)
        assert len(ran) >= len(masks) - 1  # of full ones in a row, the second need not run
        assert seen.count("linear") == sum(int(m.sum()) for m in masks)
