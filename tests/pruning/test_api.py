from __future__ import annotations

import copy
import functools
import re
import warnings

import pytest
import torch
from torch import nn

import lobs
from lobs import ErrorBudget, LobsError, Sparsity
from lobs.calibration.comparison import compare


def network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, groups=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 9, 20),
        nn.ReLU(),
        nn.Linear(20, 4),
    )


def data(n=64):
    return [(torch.randn(n // 4, 1, 8, 8), torch.zeros(n // 4)) for _ in range(4)]


def test_prune_leaves_the_users_model_alone():
    model, batches = network(), data()
    model.train()
    before = copy.deepcopy(model.state_dict())
    result = lobs.prune(model, batches, lobs.Sparsity(0.5), progress=False)
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert result.model is not model


def test_inplace_writes_into_the_users_model():
    model, batches = network(), data()
    copied = lobs.prune(model, batches, lobs.Sparsity(0.5), progress=False)
    result = lobs.prune(model, batches, lobs.Sparsity(0.5), inplace=True, progress=False)
    assert result.model is model
    for a, b in zip(model.parameters(), copied.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_failure_midway_writes_nothing():
    model = network()
    model[6].weight.data[0, 0] = torch.nan
    before = [p.clone() for p in model[0].parameters()]
    with pytest.raises(LobsError, match="layer '6': weight has 1 NaN"):
        lobs.prune(model, data(), lobs.Sparsity(0.5), inplace=True, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))


@pytest.mark.parametrize("inputs", ["dense", "pruned"])
def test_layer_error_is_what_running_the_layer_shows(inputs):
    model, batches = network(), data()
    result = lobs.prune(model, batches, lobs.Sparsity(0.6), inputs=inputs, progress=False)
    watched = result.model if inputs == "pruned" else model
    for row in result.layers:
        dense, sparse = model.get_submodule(row.name), result.model.get_submodule(row.name)
        seen = []
        handle = watched.get_submodule(row.name).register_forward_pre_hook(
            lambda m, args, seen=seen: seen.append(args[0])
        )
        with torch.no_grad():
            for x, _ in batches:
                watched(x)
            handle.remove()
            y = torch.cat(seen)
            total = (dense(y) - sparse(y)).double().square().sum() / row.samples
        assert row.error == pytest.approx(float(total), rel=1e-4)


def test_masks_and_counts_are_those_of_the_model():
    result = lobs.prune(network(), data(), Sparsity({"0": 0.5, "4": 0.9}), progress=False)
    assert [(x.name, x.kept) for x in result.layers] == [("0", 27), ("4", 108), ("6", 80)]
    for name, mask in result.masks.items():
        weight = result.model.get_parameter(name)
        assert bool((weight[~mask] == 0).all())
    assert int((~result.masks["4.weight"]).sum()) == 1080 - 108
    assert result.kept == 27 + 108 + 80 and result.total == 54 + 1080 + 80


def test_layers_outside_the_target_are_untouched():
    model = network()
    result = lobs.prune(model, data(), Sparsity({"4": 0.9}), progress=False)
    assert torch.equal(model[0].weight, result.model[0].weight) and torch.equal(
        model[6].bias, result.model[6].bias
    )
    skipped = lobs.prune(model, data(), lobs.Sparsity(0.9), skip="6", progress=False)
    assert torch.equal(model[6].weight, skipped.model[6].weight) and len(skipped.layers) == 2


def test_error_budget_holds_for_every_layer():
    result = lobs.prune(network(), data(), ErrorBudget(0.1, relative=True), progress=False)
    assert all(0 < row.relative_error <= 0.1 for row in result.layers)
    assert all(row.kept < row.total for row in result.layers)


def test_bias_can_be_pruned_when_asked():
    model = network()
    target = lobs.Sparsity({"6": 1.0})
    kept = lobs.prune(model, data(), target, progress=False)
    assert bool((kept.model[6].bias != 0).all()) and "6.bias" not in kept.masks
    numerics = lobs.Numerics(prune_bias=True)
    gone = lobs.prune(model, data(), target, progress=False, numerics=numerics)
    assert bool((gone.model[6].bias == 0).all()) and not bool(gone.masks["6.bias"].any())
    assert gone.total == kept.total + 6 + 20 + 4


def test_removing_nothing_changes_nothing():
    model, batches = network(), data()
    result = lobs.prune(model, batches, lobs.Sparsity(0.0), progress=False)
    assert result.certificate.measured == pytest.approx(0, abs=1e-5)
    assert result.kept == result.total


def test_what_is_sparser_already_stays_as_it_is_and_is_told_so():
    model, batches = network(), data()
    sparse = lobs.prune(model, batches, lobs.Sparsity(0.9), progress=False).model
    with pytest.warns(lobs.NumericalWarning, match="keep fewer than they had"):
        again = lobs.prune(sparse, batches, lobs.Sparsity(0.5), refit="layers", progress=False)
    for name, mask in again.masks.items():
        assert not bool(
            again.model.state_dict()[name][(sparse.state_dict()[name] == 0) | ~mask].any()
        )
    assert again.certificate.measured < 1e-6


def test_a_layer_that_loses_weights_is_no_sparse_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        model[0].weight *= torch.rand(64, 20) < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error", lobs.NumericalWarning)
        lobs.prune(
            model,
            [torch.randn(2000, 20)],
            Sparsity(0.5, scope="layer"),
            progress=False,
            numerics=lobs.Numerics(damping=0.001),
        )


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_small_weights_that_come_back_are_not_taken_for_dust(kind):
    z = torch.randn(4000, 8, 3, dtype=torch.float64) * 2e-5
    z[..., 2] = z[..., 0] + z[..., 1] + 2e-6 * torch.randn(4000, 8, dtype=torch.float64)
    weight = torch.full((4, 8, 3), 1e-3)
    weight[..., 2] = 0
    x = z.flatten(1)
    problem = lobs.Problem(weight.flatten(1).to(kind), x.T @ x / 4000, samples=4000)
    found = lobs.solve(problem, "auto", Sparsity(2 / 3))
    assert found.error < 0.2 * found.energy and bool((found.weight != 0).sum() == 32)


def test_a_generator_is_as_good_as_a_list():
    model, batches = network(), data()
    listed, read = (
        lobs.prune(model, b, lobs.Sparsity(0.5), progress=False) for b in (batches, iter(batches))
    )
    assert all(
        torch.equal(a, b) for a, b in zip(listed.masks.values(), read.masks.values(), strict=True)
    )
    assert read.certificate.measured == listed.certificate.measured


def test_a_data_loader_works():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(40, 1, 8, 8)), batch_size=16
    )
    assert (
        lobs.prune(network(), loader, lobs.Sparsity(0.5), progress=False).settings["samples"] == 40
    )


def test_pruned_inputs_see_the_pruned_network():
    model, batches = network(), data(256)
    target = lobs.Sparsity(
        0.8, scope="layer"
    )  # a shared budget would look at two different pruned networks
    dense = lobs.prune(model, batches, target, refit="layers", progress=False)
    pruned = lobs.prune(model, batches, target, inputs="pruned", progress=False)
    assert torch.equal(dense.model[0].weight, pruned.model[0].weight)
    assert not torch.equal(dense.model[4].weight, pruned.model[4].weight)


def test_more_weights_never_hurt_the_layer():
    errors = [
        lobs.prune(network_of(7), DATA, lobs.Sparsity(f), progress=False).layers[1].error
        for f in (0.2, 0.5, 0.8, 0.95)
    ]
    assert errors == sorted(errors)


def network_of(seed):
    torch.manual_seed(seed)
    return network()


DATA = data()


@pytest.mark.parametrize(
    "wrong", [{"inputs": "sideways"}, {"solver": "best"}, {"layers": "nope"}, {"target": "a lot"}]
)
def test_wrong_arguments_name_the_choices(wrong):
    arguments = {"target": lobs.Sparsity(0.5), "progress": False} | wrong
    with pytest.raises(LobsError, match=r"use|There are"):
        lobs.prune(network(), DATA, **arguments)


def test_half_precision_weights_stay_half():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).to(torch.bfloat16)
    result = lobs.prune(
        model, [torch.randn(50, 8, dtype=torch.bfloat16)], lobs.Sparsity(0.5), progress=False
    )
    assert result.model[0].weight.dtype == torch.bfloat16
    assert int((result.model[0].weight == 0).sum()) >= 24


def test_summary_says_what_was_done():
    text = lobs.prune(network(), DATA, lobs.Sparsity(0.5), progress=False).summary()
    assert text.startswith("2.0× fewer weights: 607 of 1,214 kept (50.00 %).\n")
    assert re.search(r"Output change: [\d.]+ % measured.* \(of the output's norm, ", text)


def test_deviation_is_root_mean_square_over_samples():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    x = torch.randn(10, 3)
    with torch.no_grad():
        expected = ((a(x) - b(x)).square().sum() / 10).sqrt()
    assert compare(a, b, [x[:3], x[3:]]).output == pytest.approx(float(expected), rel=1e-5)


def test_names_in_the_package_are_there():
    for name in lobs.__all__:
        assert getattr(lobs, name) is not None
    assert lobs.calibration.collect.collect_moments is lobs.collect_moments
    with pytest.raises(AttributeError):
        _ = lobs.nothing


@pytest.mark.parametrize(
    "target",
    [
        lobs.Sparsity(1.0),
        lobs.Sparsity(1.0, scope="layer"),
        lobs.Sparsity({"*": 1.0}),
        lobs.Budget(parameters=0),
        lobs.NByM(0, 4),
        lobs.Block(1.0),
        lobs.Structured(1.0),
        lobs.Sparsity(0.99999),
        lobs.Sparsity(0.99999, scope="layer"),
        lobs.Budget(flops=0),
        lobs.ErrorBudget(1e9),
    ],
    ids=repr,
)
def test_a_target_that_leaves_nothing_is_refused(target):
    with pytest.raises(LobsError, match="leaves nothing of the network"):
        lobs.prune(network(), data(), target, progress=False)


@pytest.mark.parametrize("keep", [0.1, "10%", " 10 %", {"*": 0.1}, {"0": "10%", "*": 0.1}])
def test_keep_is_the_fraction_that_stays(keep):
    result = lobs.prune(network(), data(), keep=keep, progress=False)
    each = [layer.total - lobs.Sparsity(0.9).count(layer.total) for layer in result.layers]
    expected = sum(each) if isinstance(keep, dict) else round(0.1 * result.total)
    assert result.kept == expected


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"keep": 0.0}, "keep is 0.0: the kept fraction must lie above 0"),
        ({"keep": "110%"}, "keep is 110%: the kept fraction must lie above 0 and at most at 1"),
        ({"keep": {"0": 7}}, r"keep\['0'\] is 7"),
        ({"keep": {}}, "keep is {}: name at least one layer"),
        ({"keep": "some"}, "keep is 'some': it must be a number"),
        ({}, "neither target nor keep is given: say keep=0.1"),
        ({"target": lobs.NByM(2, 4), "keep": 0.5}, "both target and keep are given"),
        ({"target": 0.1}, r"target is 0.1: say keep=0.1 .* or lobs.Sparsity\(0.1\) to remove it"),
        ({"target": "2:4"}, "is not one of ours"),
    ],
)
def test_what_is_kept_is_said_once_and_plainly(wish, words):
    with pytest.raises(LobsError, match=words):
        lobs.prune(network(), data(), **wish, progress=False)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"damping": 0.1}, r"numerics=lobs.Numerics\(damping=…\)"),
        ({"resume": "x"}, r"execution=lobs.Execution\(resume=…\)"),
        ({"evaluate": len}, r"lobs.Budget\(drop=…, evaluate=…\)"),
        ({"compensate": "layers"}, "say refit=…"),
        ({"speed": 2}, "one of solver, inputs, refit"),
    ],
)
def test_an_unknown_option_is_answered_with_the_right_line(option, remedy):
    with pytest.raises(TypeError, match=remedy):
        lobs.prune(network(), data(), keep=0.5, **option)


def test_removing_all_units_of_a_hidden_layer_is_refused():
    with pytest.raises(LobsError, match=r"layer '0' has only 6 units: all would go for 0\.99"):
        lobs.prune(network(), data(), lobs.Structured(0.99), progress=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda: lobs.Execution(resume=3), "resume is 3: give the path of a folder"),
        (lambda: lobs.Execution(log=True), "log is True: give the path of a file"),
        (lambda: lobs.Execution(distributed="yes"), "distributed is 'yes': True or False"),
        (lambda: lobs.Execution(memory="8 apples"), "memory is '8 apples': give bytes"),
        (lambda: lobs.Numerics(damping=True), "damping is True: it must be finite"),
        (lambda: lobs.Numerics(batch_norm=1), "batch_norm is 1: True or False"),
    ],
)
def test_options_are_checked_where_they_are_made(options, words):
    with pytest.raises(LobsError, match=words):
        options()


def test_no_repr_prints_the_data_of_a_score():
    score = functools.partial(len, torch.randn(100, 100))
    assert repr(lobs.Budget(drop=0.1, evaluate=score)) == "Budget(drop=0.1, evaluate=partial)"


def test_a_resumed_search_for_a_drop_refuses_another_score(tmp_path):
    def search(score):
        target = lobs.Budget(drop=0.5, evaluate=lambda _: score)
        execution = lobs.Execution(resume=tmp_path)
        return lobs.prune(network_of(0), DATA, target, execution=execution, progress=False)

    assert search(1.0).kept == search(1.0).kept
    with pytest.raises(LobsError, match=r"belongs to another run: target was Budget\(drop=0.5"):
        search(2.0)


def test_a_resumed_search_for_a_drop_refuses_a_score_that_has_changed(tmp_path):
    """A score may read what no fingerprint covers, such as a file."""
    said = tmp_path / "score"

    def score(_):
        return float(said.read_text())

    def search(value):
        said.write_text(str(value))
        target = lobs.Budget(drop=0.5, evaluate=score)
        execution = lobs.Execution(resume=tmp_path / "run")
        return lobs.prune(network_of(0), DATA, target, execution=execution, progress=False)

    assert search(1.0).kept == search(1.0).kept
    with pytest.raises(LobsError, match="gives the dense network 2, but gave 1 when the run began"):
        search(2.0)


def test_swapped_or_wrong_objects_are_answered_with_the_right_line(tmp_path):
    model = network()
    result = lobs.prune(model, data(), keep=0.5, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(LobsError, match=r"give a torch\.nn\.Module first, then the batches"):
        lobs.prune(data(), model, keep=0.5)
    with pytest.raises(LobsError, match=r"write hold\(model, result.masks, optimizer\)"):
        lobs.hold(model, optimizer, result.masks)
    with pytest.raises(LobsError, match=r"write certify\(dense, pruned, batches\)"):
        lobs.certify(model, data(), result.model)
    with pytest.raises(LobsError, match=r"give the network, such as result\.model"):
        lobs.shrink(result, data())
    with pytest.raises(LobsError, match=r"give its network, result\.model"):
        lobs.save(result, tmp_path / "x.safetensors")
