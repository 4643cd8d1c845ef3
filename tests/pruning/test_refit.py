"""The joint refit: what may move, what may not, and that it helps on inputs never seen."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import lobs
from lobs._system.distributed import ProcessGroup
from lobs.layers import find_layers
from lobs.pruning.refit import gauss_newton, joint, split
from lobs.pruning.refit.joint import JointRefit, effort, refit_jointly


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5)
    ).eval()


def batches(count=8, size=50, width=12):
    torch.manual_seed(1)
    mix = torch.randn(width, width)
    return [torch.randn(size, width) @ mix for _ in range(count)]


def cut(model, data, **options):
    return lobs.prune(model, data, lobs.Sparsity(0.8), progress=False, **options)


def deviation(model, other, data):
    x = torch.cat(data)
    with torch.no_grad():
        return float((model(x) - other(x)).double().square().sum(dim=1).mean().sqrt())


def test_the_output_comes_nearer_also_on_inputs_that_were_never_seen():
    model, data = network(), batches(12)
    alone, group = (cut(model, data[:8], refit=how) for how in ("layers", "network"))
    assert deviation(model, group.model, data[:8]) < 0.95 * deviation(model, alone.model, data[:8])
    assert deviation(model, group.model, data[8:]) < 0.95 * deviation(model, alone.model, data[8:])
    assert group.certificate.measured == pytest.approx(
        deviation(model, group.model, data[:8]), rel=1e-4
    )
    assert group.settings["refit"].startswith("all layers jointly")
    assert "refit" not in alone.settings


def test_the_same_weights_are_gone_and_all_of_them_are_zero():
    model, data = network(), batches()
    alone, group = (cut(model, data, refit=how) for how in ("layers", "network"))
    state = group.model.state_dict()
    for name, mask in group.masks.items():
        assert torch.equal(mask, alone.masks[name])
        assert not state[name][~mask].any()


def test_small_networks_have_it_by_default_and_baselines_do_not():
    model, data = network(), batches()
    assert "all layers jointly" in cut(model, data).settings["refit"]
    assert "refit" not in cut(model, data, solver="greedy").settings
    assert "refit" not in cut(model, data, inputs="dense").settings


def test_layers_that_are_left_alone_stay_as_they_were_to_the_bit():
    model, data = network(), batches()
    result = lobs.prune(
        model, data, lobs.Sparsity({"0": 0.8, "4": 0.5}), refit="network", progress=False
    )
    assert torch.equal(result.model[2].weight, model[2].weight) and torch.equal(
        result.model[2].bias, model[2].bias
    )
    assert not torch.equal(result.model[4].bias, model[4].bias)


def test_rows_of_one_parameter_that_belong_to_other_layers_do_not_move():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    data = [torch.randn(20, 6, 8) for _ in range(4)]
    names = [layer.name for layer in find_layers(model)]
    queries = next(name for name in names if "q" in name.rsplit(".", 1)[-1])
    result = lobs.prune(model, data, lobs.Sparsity({queries: 0.5}), refit="network", progress=False)
    before, after = model.self_attn.in_proj_weight, result.model.self_attn.in_proj_weight
    assert torch.equal(before[8:], after[8:]) and not torch.equal(before[:8], after[:8])
    assert "all layers jointly" in result.settings["refit"]


def test_products_are_those_of_the_jacobian():
    model, data = network(), batches(2, 10)
    masks = {"0.weight": torch.rand(30, 12) < 0.5}
    free = joint.kept_entries(find_layers(model), masks)
    window = gauss_newton.Window(
        gauss_newton.Survivors(model, model, find_layers(model), free), data
    )
    at = window.survivors.at
    v = {name: torch.randn_like(t) * free[name] for name, t in at.items()}
    size = {name: torch.rand_like(t) for name, t in at.items()}

    jacobians = jacrev(lambda p: functional_call(model, p, (torch.cat(data),)))(at)
    moved = sum(
        torch.einsum("nok,k->no", j.flatten(2), v[name].flatten()) for name, j in jacobians.items()
    )
    found = window._curved(at, v, size)
    for name, j in jacobians.items():
        expected = torch.einsum("nok,no->k", j.flatten(2), moved).view_as(v[name]) / 20
        expected = (expected + gauss_newton._DAMPING * size[name] * v[name]) * free[name]
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)


def test_one_layer_that_is_solved_already_gains_nothing():
    """On one linear layer the whole network's least squares is the layer's own."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(12, 5)), batches(8, 500)
    alone, group = (cut(model, data, refit=how) for how in ("layers", "network"))
    assert deviation(model, group.model, data) == pytest.approx(
        deviation(model, alone.model, data), rel=1e-3
    )


def test_never_further_from_the_dense_network_on_the_batches_kept_back():
    for seed in range(5):
        model, data = network(seed), batches(8, 6)  # far too few to learn from
        pruned = cut(model, data, refit="layers")
        moved = copy.deepcopy(pruned.model)
        effect = refit_jointly(
            moved,
            model,
            data,
            find_layers(moved),
            pruned.masks,
            samples=48,
            madds=1000.0,
            work=None,
        )
        assert (
            effect.after is not None and effect.before is not None and effect.after <= effect.before
        )
        assert deviation(model, moved, data[7:]) == pytest.approx(effect.after, rel=1e-5)
        assert deviation(model, pruned.model, data[7:]) == pytest.approx(effect.before, rel=1e-5)


def test_a_module_used_twice_gets_its_parameters_back():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
    model = nn.Sequential(block, block, nn.Linear(12, 3)).eval()
    group = cut(model, batches())
    assert group.settings["refit"].startswith("all layers jointly")
    assert isinstance(group.model[0][0].weight, nn.Parameter) and group.model[0] is group.model[1]
    assert not bool(group.model[0][0].weight[~group.masks["0.0.weight"]].any())


def test_shared_weights_stay_shared():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = (
                nn.Linear(12, 12),
                nn.Linear(12, 12),
                nn.Linear(12, 4),
            )
            self.again.weight, self.again.bias = self.first.weight, self.first.bias

        def forward(self, x):
            return self.last(torch.relu(self.again(torch.relu(self.first(x)))))

    torch.manual_seed(0)
    result = cut(Twice().eval(), batches(), refit="network")
    assert torch.equal(result.model.first.weight, result.model.again.weight)
    assert "all layers jointly" in result.settings["refit"]


def test_a_run_that_is_taken_up_ends_with_the_same_bits(tmp_path):
    model, data = network(), batches()
    one = cut(model, data, execution=lobs.Execution(resume=tmp_path))
    two = cut(model, data, execution=lobs.Execution(resume=tmp_path))
    plain = cut(model, data)
    for a, b, c in zip(
        one.model.parameters(), two.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert one.settings["refit"] == two.settings["refit"]


class _NoForwardDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Odd(nn.Module):
    def forward(self, x):
        return _NoForwardDerivative.apply(x)


def test_what_cannot_be_done_is_said_and_the_layers_own_answer_stands():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(12, 30), _Odd(), nn.Linear(30, 5)).eval(), batches()
    target = lobs.Sparsity(0.8, scope="layer")  # a shared budget goes back through the network
    alone = lobs.prune(model, data, target, refit="layers", progress=False)
    with pytest.warns(lobs.NumericalWarning, match="weights were left layer by layer"):
        group = lobs.prune(model, data, target, refit="network", progress=False)
    assert "cannot be differentiated forward and back" in group.settings["refit"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(alone.model.parameters(), group.model.parameters(), strict=True)
    )


def test_few_batches_are_cut_so_that_an_eighth_is_kept_back():
    model, data = network(), batches(8)
    eight, one, two = (
        cut(model, d) for d in (data, [torch.cat(data)], [torch.cat(data[:4]), torch.cat(data[4:])])
    )
    assert "on 50 held-out samples" in one.settings["refit"]
    assert "on 50 held-out samples" in two.settings["refit"]
    for (
        name,
        weight,
    ) in one.model.state_dict().items():  # the last of eight parts is the last of eight batches
        torch.testing.assert_close(weight, eight.model.state_dict()[name], rtol=1e-3, atol=1e-4)
    labelled = cut(model, [(torch.cat(data), torch.zeros(400))])
    assert labelled.settings["refit"] == one.settings["refit"]


def test_batches_are_cut_only_where_that_makes_no_difference():
    first, second = (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=front).eval() for front in (True, False)
    )
    x = torch.randn(64, 4, 8)

    def parts(network, data):
        found = split.split(network, data, 20, 100)
        if found is None:
            return None
        return [len(b) for b in found.at_work()], [len(b) for b in found.kept_back()]

    assert parts(first, [x]) == ([19, 19, 18], [8])
    assert parts(first, [(x, None), (x[:4], None)])[1] == [8]  # small ones stay whole
    assert parts(first, [x[:15]]) is None
    assert parts(first, [x[:15]] * 2) == ([15], [15])
    assert parts(second, [x]) is None and parts(second, [x, x]) == ([64], [64])
    assert parts(first, [x] * 8) == ([64] * 7, [64])
    assert split.split(first, [{"src": x}], 20, 100) is None


def test_the_data_are_not_held_for_what_is_too_dear():
    class Counted(list):
        read = 0

        def __iter__(self):
            for batch in super().__iter__():
                self.read += 1
                yield batch

    model, data = network(), Counted(batches(7))
    pruned = cut(model, data, refit="layers")
    data.read = 0
    dear = refit_jointly(
        copy.deepcopy(pruned.model),
        model,
        data,
        find_layers(model),
        pruned.masks,
        samples=350,
        madds=1e15,
    )
    assert "multiply-adds" in dear.reason and data.read == 1


def test_one_sample_is_too_few():
    assert "two batches" in cut(network(), [batches(1)[0][:1]]).settings["refit"]


def test_batches_without_samples_end():
    assert "refit" in cut(network(), [torch.empty(0, 12), batches(1)[0]]).settings
    assert "nothing" in cut(network(), [batches(1)[0][:15], torch.empty(0, 12)]).settings["refit"]
    assert (
        "on 6 held-out samples"
        in cut(network(), [batches(1)[0], torch.empty(0, 12)]).settings["refit"]
    )


def test_what_is_kept_back_does_not_come_again_in_another_order():
    class Shuffled:
        def __init__(self, data):
            self.data, self.passes = data, 0

        def __len__(self):
            return len(self.data)

        def __iter__(self):
            self.passes += 1
            order = torch.randperm(200, generator=torch.Generator().manual_seed(self.passes))
            return iter(torch.cat(self.data)[order].split(50))

    model, data = network(), batches(4)
    steady = list(split._steady(data, 10))
    assert all(a is b for a, b in zip(steady, data, strict=True))
    once = split._steady(Shuffled(data), 200)
    assert (
        torch.equal(torch.cat(list(once)), torch.cat(list(once)))
        and len(torch.cat(list(once)).unique(dim=0)) == 200
    )
    pruned = cut(model, data, refit="layers")
    moved = copy.deepcopy(pruned.model)
    effect = refit_jointly(
        moved,
        model,
        Shuffled(data),
        find_layers(moved),
        pruned.masks,
        samples=200,
        madds=1e3,
        work=None,
    )
    assert effect.held_out == 24 and effect.after <= effect.before


def test_a_shuffling_loader_of_large_batches_keeps_some_back():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.cat(batches(160))), batch_size=800, shuffle=True)
    assert "held-out samples" in cut(network(), loader).settings["refit"]


@pytest.mark.parametrize("counts", [(16, 0), (0, 16), (12, 4), (4, 12), (5, 5, 6), (2, 0), (0, 2)])
def test_processes_keep_back_what_one_alone_would(counts, monkeypatch):
    class Told(ProcessGroup):
        def all_gather(self, said):
            return [*counts] if isinstance(said, int) and not isinstance(said, bool) else [said]

    order = [
        (i, rank) for i in range(max(counts)) for rank in range(len(counts)) if i < counts[rank]
    ]
    every = min(8, len(order))
    expected = {place for number, place in enumerate(order) if number % every == every - 1}
    found = set()
    for rank in range(len(counts)):
        monkeypatch.setattr(split, "process_group", lambda rank=rank: Told(rank, len(counts)))
        monkeypatch.setattr(Told, "raise_together", lambda self: nullcontext())
        data = [torch.full((3, 12), float(i)) for i in range(counts[rank])]  # too small to be cut
        found |= {
            (int(batch[0, 0]), rank)
            for batch in split.split(network(), data, 100, 1000).kept_back()
        }
    assert found == expected


def test_networks_are_let_go():
    model, data = network(), batches()
    gone = weakref.ref(cut(model, data).model)
    gc.collect()
    assert gone() is None


def test_batches_are_joined_only_where_that_makes_no_difference():
    x = [torch.randn(6, 4, 8) for _ in range(2)]
    first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    second = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False).eval()
    with torch.no_grad():
        assert gauss_newton.separable(first, x) and gauss_newton.separable(
            first, [(y, 1) for y in x]
        )
        assert not gauss_newton.separable(second, x)
        assert not gauss_newton.separable(nn.BatchNorm1d(4, track_running_stats=False).eval(), x)
        assert not gauss_newton.separable(first, x[:1])
        assert not gauss_newton.separable(nn.Flatten(0), [torch.randn(6, 4), torch.randn(6, 5)])


def test_an_output_that_is_not_finite_is_no_reason_to_move():
    class Masked(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])

    torch.manual_seed(0)
    model = Masked(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5)).eval()
    result = lobs.prune(model, batches(), lobs.Sparsity(0.5, scope="layer"), progress=False)
    assert "the held-out batches hold nothing to compare" in result.settings["refit"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refit": "all"}, "use 'layers', 'blocks', 'network'"),
        ({"refit": "network", "inputs": "dense"}, "use inputs='asymmetric'"),
        (
            {"refit": "network", "execution": lobs.Execution(memory="8GB")},
            "leave out memory",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(lobs.LobsError, match=words):
        cut(network(), batches(), **options)


def test_large_networks_go_without_unless_asked():
    assert effort(20_000, 10, 3e5, 60_000, joint.WORK).steps > 3
    tried = effort(12_000_000, 1000, 4e9, 1000, joint.WORK)
    assert not tried.steps and "multiply-adds" in tried.reason
    assert effort(12_000_000, 1000, 4e9, 1000, None).steps


def test_what_happened_is_said_in_words():
    assert str(JointRefit(reason="weights are float16")) == "layer by layer (weights are float16)"
    assert "did not help on held-out samples (output deviation 1 → 1.2 on" in str(
        JointRefit(0, 1.0, 1.0, 5, tried=1.2)
    )
    assert (
        str(JointRefit(3, 1.0, 0.5, 500))
        == "all layers jointly, 3 steps (output deviation 1 → 0.5 on 500 held-out samples)"
    )


def test_torchs_own_deprecations_are_not_the_users_concern(recwarn):
    warnings.simplefilter("always")
    cut(network(), batches())
    assert not [w for w in recwarn if issubclass(w.category, DeprecationWarning)]


def test_forward_passes_that_a_step_keeps_change_no_bit(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))
    batches = list(torch.randn(6, 40, 12))
    found = []
    for room in (0, 2**27):
        monkeypatch.setattr("lobs.pruning.refit.gauss_newton._KEPT_BYTES", room)
        result = lobs.prune(model, batches, keep=0.4, refit="network", progress=False)
        found.append(result.model.state_dict())
    assert "jointly" in result.settings["refit"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
