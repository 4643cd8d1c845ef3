from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.batch_norm import _Sums, find_norms, reestimate
from lobs.calibration.comparison import Comparison, compare
from lobs.certificate.verify import verify_errors


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


def network():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 3),
    )


def data(sizes=(40, 24, 16)):
    return [torch.randn(n, 2, 8, 8) + 3 for n in sizes]


def inputs_of(model, name, batches):
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda m, args: seen.append(args[0])
    )
    with torch.no_grad():
        for x in batches:
            model(x)
    handle.remove()
    return torch.cat(seen).transpose(0, 1).flatten(1).double()


def prune(model, batches, fraction=0.5, inputs="dense", **settings):
    """Without compensation, so that what normalisations receive really moves."""
    target = lobs.Sparsity(fraction, scope="layer")
    return lobs.prune(
        model, batches, target, solver="magnitude", inputs=inputs, progress=False, **settings
    )


def pruned_without(model, batches):
    return prune(model, batches, numerics=lobs.Numerics(batch_norm=False)).model


class Claimed(Comparison):
    """A comparison whose distances are given, so that a test decides whether statistics stay."""

    def __init__(self, dense, pruned, claims=None):
        super().__init__(dense, pruned)
        self.claims = claims

    def join(self):
        super().join()
        self.output = None if self.claims is None else next(self.claims)
        return self


def update(pruned, dense, batches, claims=None):
    """Return the effect; without claims outputs are not compared, so new statistics stay."""
    return reestimate(pruned, dense, batches, lambda: Claimed(dense, pruned, claims))[0]


def moved_by_hand(old, dense, pruned):
    """Return (mean, var) by definition, from the norm's inputs in both networks."""
    mean, var = old.running_mean.double(), old.running_var.double()
    ratio = ((pruned.var(1) + old.eps) / (dense.var(1) + old.eps)).clamp(0.25, 4)
    return (mean + pruned.mean(1) - dense.mean(1)).float(), (
        (var + old.eps) * ratio - old.eps
    ).clamp_min(0).float()


def test_a_network_that_lost_nothing_keeps_its_statistics_to_the_bit():
    model = trained_like(network(), data())
    same = copy.deepcopy(model)
    assert update(same, model, data()) is None
    assert all(torch.equal(v, same.state_dict()[k]) for k, v in model.state_dict().items())


class Twice(nn.Module):
    """A norm that is called twice in a pass, once by keyword, and one behind it."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x):
        once = self.norm(self.fc(x))
        return self.last(self.norm(input=3 * self.fc(once)))


def test_a_norm_that_is_called_twice_is_compared_call_by_call():
    batches = [torch.randn(30, 6) for _ in range(4)]
    model = trained_like(Twice(), batches)
    same = copy.deepcopy(model)
    assert update(same, model, batches) is None
    effect = prune(model, batches, 0.1).batch_norm
    assert (
        effect is not None and effect.after < 1.1 * effect.before
    )  # all calls at once: a thousand times worse


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5])
@pytest.mark.parametrize("shape", [(600, 3), (64, 3, 5, 5), (9, 3, 200, 200)])
def test_statistics_keep_their_digits_however_far_the_data_lie_from_the_running_mean(shape, mean):
    x = mean + torch.randn(shape)
    sums = _Sums(torch.zeros(3))
    for piece in x.split(len(x) // 3):
        sums.add(piece)
    exact = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(sums.mean, exact.mean(1), rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(sums.variance, exact.var(1), rtol=1e-5, atol=0)


def test_a_switch_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(lobs.LobsError, match="batch_norm is 'no': True or False"):
        lobs.prune(
            network(),
            data(),
            lobs.Sparsity(0.5),
            progress=False,
            numerics=lobs.Numerics(batch_norm="no"),
        )


def test_an_evaluate_that_forgets_eval_mode_is_run_in_it_and_leaves_the_network_as_it_was():
    model, x = trained_like(network(), data()).train(), data()
    before, modes = copy.deepcopy(model.state_dict()), []

    def forgets(net):
        modes.append(net.training)
        return float(-net(x[0]).square().mean())

    found = lobs.prune(model, x, lobs.Budget(drop=0.5, evaluate=forgets), progress=False)
    assert not any(modes) and model.training and found.model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_evaluate_does_to_a_network_is_in_the_certificate():
    model = trained_like(network(), data()).train()

    def trains_a_little(net):
        net.train()
        net(data()[0] + 1)
        return -float((net[7].weight == 0).float().mean() > 0.6)

    x = data()
    found = lobs.prune(model, x, lobs.Budget(drop=0.5, evaluate=trains_a_little), progress=False)
    assert found.certificate.measured == pytest.approx(
        compare(model, found.model, x).output, rel=1e-5
    )


def test_a_channel_without_variance_and_a_norm_without_epsilon_stay_finite():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.0), nn.ReLU(), nn.Linear(4, 2)
    ).eval()
    with torch.no_grad():
        model[0].weight[1] = 0  # a channel that is the same for all inputs
    batches = [torch.randn(20, 4)]
    same = copy.deepcopy(model)
    assert update(same, model, batches) is None
    pruned = prune(model, batches).model
    assert bool(torch.isfinite(pruned(batches[0])).all())


def test_the_first_norm_moves_by_what_all_samples_say_however_batched():
    batches = data()
    model = trained_like(network(), data())
    pruned = pruned_without(model, batches)
    update(pruned, model, batches)
    mean, var = moved_by_hand(
        model[1], inputs_of(model, "1", batches), inputs_of(pruned, "1", batches)
    )
    torch.testing.assert_close(pruned[1].running_mean, mean)
    torch.testing.assert_close(pruned[1].running_var, var)


def test_deeper_norms_come_within_a_whisker_of_their_fixed_point():
    batches = data()
    model = trained_like(network(), data())
    pruned = pruned_without(model, batches)
    update(pruned, model, batches)
    for name in ("4", "8"):
        norm = pruned.get_submodule(name)
        wanted = moved_by_hand(
            model.get_submodule(name),
            inputs_of(model, name, batches),
            inputs_of(pruned, name, batches),
        )
        torch.testing.assert_close(norm.running_mean, wanted[0], rtol=0.03, atol=0.03)
        torch.testing.assert_close(norm.running_var, wanted[1], rtol=0.05, atol=0.03)


def test_where_the_old_statistics_were_those_of_one_batch_the_new_ones_are_what_torch_would_keep():
    (x,) = batches = data((64,))
    model = trained_like(network(), batches)
    pruned = pruned_without(model, batches)
    reference = copy.deepcopy(pruned)
    update(pruned, model, batches)
    for norm in find_norms(reference).values():
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        reference(x)
    # torch normalises with the biased variance of the batch and keeps the unbiased one: a factor of
    # 63/64 in the last.
    for name, norm in find_norms(pruned).items():
        torch.testing.assert_close(
            norm.running_mean, reference.get_submodule(name).running_mean, rtol=0.02, atol=0.02
        )
        torch.testing.assert_close(
            norm.running_var, reference.get_submodule(name).running_var, rtol=0.05, atol=0.02
        )


class Block(nn.Module):
    """A residual block with two norms."""

    def __init__(self, width):
        super().__init__()
        parts = [
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
        ]
        self.inner = nn.Sequential(*parts)

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def test_sixty_norms_one_behind_the_other_do_not_correct_the_same_thing_sixty_times():
    """Statistics come from louder data; setting all norms at once quadrupled the deviation."""
    at_hand = [torch.randn(100, 16) for _ in range(4)]
    model = trained_like(
        nn.Sequential(*[Block(16) for _ in range(30)], nn.Linear(16, 4)), [1.2 * x for x in at_hand]
    )
    effect = prune(model, at_hand, 0.05).batch_norm
    assert effect is not None and effect.changed and len(effect.layers) == 60
    assert effect.after < 0.95 * effect.before


def test_pruning_reestimates_by_default_and_reports_a_smaller_deviation():
    batches = data()
    model = trained_like(network(), batches)
    result = prune(model, batches)
    effect = result.batch_norm
    assert effect is not None and effect.changed and effect.layers == ("1", "4", "8")
    assert effect.after < effect.before
    assert result.certificate.measured == pytest.approx(effect.after)
    assert effect.before == pytest.approx(
        compare(model, pruned_without(model, batches), batches).output
    )
    assert (
        "3 batch norms re-estimated" in result.summary()
        and "re-estimated" in result.settings["batch norm"]
    )
    assert result.record()["batch_norm"]["after"] == effect.after
    assert result.model[1].num_batches_tracked == model[1].num_batches_tracked


def test_statistics_that_would_make_it_worse_stay_and_that_is_said():
    batches = data()
    model = trained_like(network(), batches)
    pruned = pruned_without(model, batches)
    before = copy.deepcopy(pruned.state_dict())
    effect = update(pruned, model, batches, iter([1.0, 2.0]))
    assert effect is not None and not effect.changed and "does not help" in str(effect)
    hardly = update(pruned, model, batches, iter([1.0, 0.995]))
    assert hardly is not None and not hardly.changed and "hardly helps" in str(hardly)
    assert all(torch.equal(before[k], v) for k, v in pruned.state_dict().items())


def test_norms_before_the_first_pruned_layer_are_left_alone():
    batches = data()
    model = trained_like(network(), batches)
    result = prune(model, batches, layers="7")
    assert result.batch_norm is not None and result.batch_norm.layers == ("8",)
    for name in ("1", "4"):
        assert torch.equal(
            model.get_submodule(name).running_var, result.model.get_submodule(name).running_var
        )


def test_norms_without_running_statistics_and_networks_without_norms_are_left_alone():
    plain = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 2)
    )
    assert (
        lobs.prune(plain, [torch.randn(30, 6)], lobs.Sparsity(0.5), progress=False).batch_norm
        is None
    )


def test_single_samples_as_batches_work():
    batches = [torch.randn(1, 2, 8, 8) + 3 for _ in range(40)]
    model = trained_like(network(), [torch.cat(batches)])
    effect = prune(model, batches).batch_norm
    assert effect is not None and effect.after < effect.before


def test_no_bound_is_claimed_for_changed_statistics():
    batches = data()
    model = trained_like(network(), batches)
    changed = prune(model, batches)
    assert changed.certificate.bound is None and "batch norm" in changed.certificate.reason
    assert lobs.certify(model, changed.model, batches).bound is None
    kept = prune(model, batches, numerics=lobs.Numerics(batch_norm=False))
    assert kept.batch_norm is None and kept.certificate.bound >= kept.certificate.measured


@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
def test_recorded_errors_verify_after_reestimation(tmp_path, inputs):
    batches = data()
    model = trained_like(network(), batches)
    result = prune(model, batches, inputs=inputs)
    # With asymmetric inputs weights were fitted to the old statistics, which then may stay.
    assert result.batch_norm is not None and (result.batch_norm.changed or inputs == "asymmetric")
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    findings = verify_errors(saved, model, result.model, batches)
    assert findings and all(f.holds for f in findings), findings


def test_exact_compensation_is_judged_by_the_same_measure():
    batches = data()
    model = trained_like(network(), batches)
    result = lobs.prune(model, batches, lobs.Sparsity(0.8), progress=False)
    effect = result.batch_norm
    assert effect is not None and effect.changed == (effect.after < effect.before)
    assert result.certificate.measured == pytest.approx(min(effect.before, effect.after))
