from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.blocks import in_blocks, layers_of
from lobs.calibration.collect import collect_moments
from lobs.calibration.layer_problem import asymmetric_problem, layer_problem
from lobs.calibration.moments import PairedMoments
from lobs.layers import find_layers
from tests.architectures import plain


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4 * 16, 5),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.a(x))
        x = self.relu(x + self.b(x))
        return self.c(x.flatten(1))


class Branching(Residual):
    """The same, but no tracer can follow it."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) > -1e30 else -x)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


def images():
    return [torch.randn(20, 2, 4, 4, generator=torch.Generator().manual_seed(s)) for s in range(3)]


def walk(dense, pruned, batches, layers, **how):
    for block in in_blocks(dense, pruned, batches, layers, **how):
        yield from layers_of(block)


def pairs(dense, pruned):
    order = list(collect_moments(dense, images()))
    before, after = ({x.name: x for x in find_layers(m)} for m in (dense, pruned))
    return [(before[name], after[name]) for name in order]


def spoil(layer):
    layer.write(layer.matrix() * 0.9)


@pytest.mark.parametrize("kind", [Residual, Branching])
def test_every_layer_sees_the_pruned_layers_before_it(kind):
    dense = kind()
    pruned, replay = copy.deepcopy(dense), copy.deepcopy(dense)
    names = []
    for layer, moments in walk(dense, pruned, images(), pairs(dense, pruned)):
        (twin,) = find_layers(replay, layer.name)
        expected = collect_moments(replay, images(), [twin])[layer.name]
        torch.testing.assert_close(moments.pruned.moment, expected.moment, rtol=1e-5, atol=1e-6)
        spoil(layer)
        spoil(twin)
        names.append(layer.name)
    assert names == ["a", "b", "c"]


def test_traced_and_rerun_streams_agree():
    dense = Residual()
    other = Branching()
    other.load_state_dict(dense.state_dict())
    seen = []
    for model in (dense, other):
        pruned = copy.deepcopy(model)
        found = {}
        for layer, moments in walk(model, pruned, images(), pairs(model, pruned)):
            found[layer.name] = moments.residual(
                torch.eye(layer.columns).expand(layer.groups, -1, -1)
            )
            spoil(layer)
        seen.append(found)
    for name in seen[0]:
        torch.testing.assert_close(seen[0][name], seen[1][name], rtol=1e-4, atol=1e-6)
    assert float(seen[0]["a"].abs().max()) == 0 and float(seen[0]["c"].abs().max()) > 0


def test_activations_on_disk_give_the_same(monkeypatch):
    model = Residual()
    in_memory = lobs.prune(model, images(), lobs.Sparsity(0.5), progress=False)
    monkeypatch.setattr("lobs.calibration.blocks.base.IN_MEMORY", 0)
    monkeypatch.setattr("lobs.calibration.blocks.base._WORTH_A_FILE", 0)
    on_disk = lobs.prune(model, images(), lobs.Sparsity(0.5), progress=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip(in_memory.masks.values(), on_disk.masks.values(), strict=True)
    )


def test_the_users_batches_are_not_written_into():
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    x = torch.randn(50, 6)
    kept = x.clone()
    pruned = copy.deepcopy(model)
    for _ in walk(
        model, pruned, [x], list(zip(find_layers(model), find_layers(pruned), strict=True))
    ):
        pass
    assert torch.equal(x, kept)


def test_the_asymmetric_target_is_the_least_squares_one(monkeypatch):
    monkeypatch.setattr("lobs.calibration.layer_problem._TETHER", 1e-9)
    layer = find_layers(nn.Sequential(nn.Linear(5, 3)).double())[0]
    x = torch.randn(300, 5, dtype=torch.float64)
    x_hat = x @ torch.randn(5, 5, dtype=torch.float64) + 0.3 * torch.randn(
        300, 5, dtype=torch.float64
    )
    moments = PairedMoments(layer)
    moments.add(layer, x, x_hat)
    problem = asymmetric_problem(
        layer_problem(layer, layer.matrix(), moments.pruned), moments.residual(layer.matrix())
    )
    ones = torch.ones(300, 1, dtype=torch.float64)
    wanted = layer.module(x).detach()
    expected = torch.linalg.lstsq(torch.cat([x_hat, ones], 1), wanted).solution.mT
    torch.testing.assert_close(problem.weight[0], expected, rtol=1e-5, atol=1e-6)


def test_how_far_two_streams_are_apart_is_the_same_whether_weighed_at_once_or_in_the_end():
    torch.manual_seed(0)
    narrow, wide = (
        find_layers(nn.Conv2d(6, rows, 3, padding=1, groups=2, bias=False))[0] for rows in (4, 60)
    )
    wide.module.weight.data[:2], wide.module.weight.data[30:32] = (
        narrow.module.weight.data[:2],
        narrow.module.weight.data[2:],
    )
    x, x_hat = torch.randn(2, 5, 6, 7, 7)
    found = []
    for layer in (narrow, wide):
        moments = PairedMoments(layer)
        moments.add(layer, x, x_hat)
        found.append(moments.residual(layer.matrix()))
        assert moments._weighed == (layer is narrow)
    torch.testing.assert_close(found[0], found[1][:, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Residual, Branching])
def test_recorded_errors_are_the_distances_of_the_running_layers(kind):
    model = kind()
    result = lobs.prune(model, images(), lobs.Sparsity(0.6), progress=False)
    outputs = {}
    for net in (model, result.model):
        for name in "abc":
            handle = getattr(net, name).register_forward_hook(
                lambda _, __, z, n=name: outputs.setdefault(n, []).append(z.detach().clone())
            )
            net(torch.cat(images()))
            handle.remove()
    for row in result.layers:
        z, z_hat = (t.transpose(1, -1) if t.dim() == 4 else t for t in outputs[row.name])
        error = float((z_hat - z).square().sum() / (z.numel() / z.shape[-1]))
        assert row.error == pytest.approx(error, rel=1e-4)


def test_asymmetric_inputs_beat_dense_ones_and_their_bound_is_tight():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 6)
    )
    x = [torch.randn(800, 20)]
    moved = {}
    for inputs in ("dense", "asymmetric"):
        certificate = lobs.prune(
            model, x, lobs.Sparsity(0.7), inputs=inputs, progress=False
        ).certificate
        assert certificate.measured <= certificate.bound
        moved[inputs] = certificate
    assert moved["asymmetric"].measured < moved["dense"].measured
    assert moved["asymmetric"].bound < 1.01 * moved["asymmetric"].measured


def test_attention_is_pruned_on_both_streams(tmp_path):
    model = Attentive()
    x = [torch.randn(30, 5, 8) for _ in range(2)]
    result = lobs.prune(model, x, lobs.Sparsity(0.4), progress=False)
    assert {row.name for row in result.layers} >= {
        "block.self_attn.q_proj",
        "block.self_attn.out_proj",
        "head",
    }
    assert result.kept == result.total - lobs.Sparsity(0.4).count(result.total)
    from lobs.certificate.verify import verify_errors, verify_masks

    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert all(
        f.holds for f in (*verify_masks(saved), *verify_errors(saved, model, result.model, x))
    )


def test_a_layer_that_the_target_leaves_out_stays_to_the_bit():
    model = Residual()
    result = lobs.prune(model, images(), lobs.Sparsity({"b": 0.5}), progress=False)
    for name in "ac":
        assert torch.equal(getattr(model, name).weight, getattr(result.model, name).weight)
        assert torch.equal(getattr(model, name).bias, getattr(result.model, name).bias)


class Choosy(nn.Module):
    """Runs its second layer once or twice, as the first one's answer says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        again = float(h.abs().sum()) > 0
        h = self.b(h).relu()
        return self.c(self.b(h) if again else h)


def test_a_layer_that_runs_less_often_once_others_are_pruned_keeps_its_own_aim():
    target = lobs.Sparsity({"a": 1.0, "b": 0.5})
    model, x = Choosy(), torch.randn(20, 6)
    for inputs in ("asymmetric", "dense"):
        result = lobs.prune(model, [x], target, inputs=inputs, progress=False)
        kept = {row.name: row.kept for row in result.layers}
        assert kept["a"] == 0 and kept["b"] == 18
        assert bool(torch.isfinite(result.model(x)).all())


def test_experts_that_get_other_tokens_in_the_pruned_network_are_pruned():
    model, batch = plain.NETWORKS["experts"]()
    result = lobs.prune(model, [batch(48) for _ in range(6)], keep=0.5, progress=False)
    assert len(result.layers) == 11 and result.kept == result.total // 2
    assert result.certificate.relative(result.certificate.measured) < 0.1


class _Constants(nn.Sequential):
    """Makes a constant and assigns a buffer in `forward`, which tracing would leave behind."""

    def __init__(self, *modules):
        super().__init__(*modules)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = x.sum() * 0 + 1
        return super().forward(x) + torch.tensor([0.0, 1.0, 2.0])


def test_tracing_leaves_nothing_on_the_network():
    torch.manual_seed(0)
    model = _Constants(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    before = {*vars(model)}
    result = lobs.prune(
        model, [torch.randn(40, 6) for _ in range(3)], lobs.Sparsity(0.5), progress=False
    )
    assert {*vars(model)} == before and isinstance(model.seen, torch.Tensor)
    assert result.kept == 36 and isinstance(result.model.seen, torch.Tensor)


class Optional(nn.Module):
    """Takes an argument that may be left out, and looks whether it is there."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, mask=None):
        h = self.a(x).relu()
        return self.b(h if mask is None else h * mask)


class Listed(Optional):
    def forward(self, *xs):
        return super().forward(xs[0])


@pytest.mark.parametrize("given", ["x", "x first", "by name", "both by name", "mixed"])
def test_an_argument_may_be_left_out(given):
    torch.manual_seed(0)
    x, mask = [torch.randn(50, 6) for _ in range(2)], torch.rand(50, 8)
    batches = {
        "x": x,
        "x first": [(each, mask) for each in x],
        "by name": [{"x": each} for each in x],
        "both by name": [{"x": each, "mask": mask} for each in x],
        "mixed": [{"x": x[0], "mask": mask}, {"x": x[1]}],
    }[given]
    dense = Optional()
    pruned, replay = copy.deepcopy(dense), copy.deepcopy(dense)
    layers = list(zip(find_layers(dense), find_layers(pruned), strict=True))
    for layer, moments in walk(dense, pruned, batches, layers):
        (twin,) = find_layers(replay, layer.name)
        expected = collect_moments(replay, batches, [twin])[layer.name]
        torch.testing.assert_close(moments.pruned.moment, expected.moment, rtol=1e-5, atol=1e-6)
        spoil(layer)
        spoil(twin)
    lobs.prune(dense, batches, lobs.Sparsity(0.5), progress=False)


def test_arguments_in_a_list_are_the_batch_not_its_first_sample():
    dense, x = Listed(), [torch.randn(50, 6)]
    pruned = copy.deepcopy(dense)
    layers = list(zip(find_layers(dense), find_layers(pruned), strict=True))
    counts = [moments.pruned.count for _, moments in walk(dense, pruned, x, layers)]
    assert counts == [50, 50]
