from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lobs import (
    Budget,
    LobsError,
    Shuffled,
    Sparsity,
    Stage,
    distillation,
    prune,
    prune_in_stages,
    retrain,
    sgd,
)


def task(n=240):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def wrong(model):
    x, y = task()
    was = model.training
    model.eval()
    with torch.no_grad():
        error = 100 * float((model(x).argmax(1) != y).float().mean())
    model.train(was)
    return error


def pruned(fraction=0.5):
    x, y = task()
    return prune(net(), [(x, y)], Sparsity(fraction), progress=False)


def zeros_held(model, masks):
    state = model.state_dict()
    return all(bool((state[name][~mask] == 0).all()) for name, mask in masks.items())


def equal(a, b):
    return all(
        torch.equal(p, q)
        for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


OPTIMISERS = {
    "sgd": sgd(0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_zeros_stay_zero_and_the_rest_learns(kind):
    cut = pruned()
    before = {name: t.clone() for name, t in cut.model.state_dict().items()}
    done = retrain(
        cut.model,
        cut.masks,
        Shuffled(*task(), 24),
        optimizer=OPTIMISERS[kind],
        iterations=60,
        progress=False,
    )
    assert zeros_held(done.model, cut.masks) and done.iterations == 60
    assert not equal(done.model, cut.model)
    assert all(
        torch.equal(before[name], t) for name, t in cut.model.state_dict().items()
    )  # untouched unless inplace


def test_training_lowers_the_error_and_stops_once_it_is_low_enough():
    cut = pruned()
    run = {
        "optimizer": sgd(0.1),
        "iterations": 600,
        "evaluate": wrong,
        "every": 10,
        "progress": False,
    }
    whole = retrain(cut.model, cut.masks, Shuffled(*task(), 24), **run)
    assert whole.error < whole.history[0][1] - 5 and whole.reached is None
    wanted = whole.history[0][1] - 5
    early = retrain(cut.model, cut.masks, Shuffled(*task(), 24), until_error=wanted, **run)
    assert early.reached and early.error <= wanted and early.iterations < 600
    assert early.history == whole.history[: len(early.history)]
    never = retrain(
        cut.model, cut.masks, Shuffled(*task(), 24), until_error=-1.0, **{**run, "iterations": 30}
    )
    assert never.reached is False and never.iterations == 30


def test_looking_more_often_changes_nothing():
    cut = pruned()
    models = [
        retrain(
            cut.model,
            cut.masks,
            Shuffled(*task(), 24),
            iterations=35,
            every=e,
            evaluate=wrong,
            progress=False,
        ).model
        for e in (1, 10, 100)
    ]
    assert equal(models[0], models[1]) and equal(models[0], models[2])


@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize("loader", ["shuffled", "dataloader", "list"])
@pytest.mark.parametrize("stop", [10, 20])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, kind, loader, stop):
    x, y = task()
    data = {
        "shuffled": Shuffled(x, y, 24),
        "dataloader": DataLoader(TensorDataset(x, y), 24, shuffle=True),
        "list": [(x[:100], y[:100]), (x[100:], y[100:])],
    }[loader]
    cut = pruned()
    run = {
        "optimizer": OPTIMISERS[kind],
        "iterations": 33,
        "decay": "cosine",
        "every": 5,
        "progress": False,
        "seed": 3,
    }
    whole = retrain(cut.model, cut.masks, data, evaluate=wrong, **run)

    looks = 0

    def interrupted(model):
        nonlocal looks
        looks += 1
        if looks == stop // 5 + 2:
            raise KeyboardInterrupt
        return wrong(model)

    state = tmp_path / "run.state"
    with pytest.raises(KeyboardInterrupt):
        retrain(cut.model, cut.masks, data, evaluate=interrupted, checkpoint=state, **run)
    again = retrain(cut.model, cut.masks, data, evaluate=wrong, checkpoint=state, **run)
    assert equal(again.model, whole.model) and again.history == whole.history
    assert equal(
        retrain(cut.model, cut.masks, data, evaluate=wrong, checkpoint=state, **run).model,
        whole.model,
    )


def test_a_state_of_another_run_is_refused(tmp_path):
    cut, state = pruned(), tmp_path / "run.state"
    retrain(
        cut.model, cut.masks, Shuffled(*task(), 24), iterations=5, checkpoint=state, progress=False
    )
    with pytest.raises(LobsError, match="belongs to a run with iterations = 5, not 6"):
        retrain(
            cut.model,
            cut.masks,
            Shuffled(*task(), 24),
            iterations=6,
            checkpoint=state,
            progress=False,
        )
    with pytest.raises(LobsError, match="belongs to a run with masks"):
        other = pruned(0.3)
        retrain(
            other.model,
            other.masks,
            Shuffled(*task(), 24),
            iterations=5,
            checkpoint=state,
            progress=False,
        )
    cut.save(tmp_path / "net.safetensors")
    with pytest.raises(LobsError, match="is not a training state"):
        retrain(
            cut.model,
            cut.masks,
            Shuffled(*task(), 24),
            checkpoint=tmp_path / "net.safetensors",
            progress=False,
        )


def test_a_teacher_needs_no_labels():
    x, _ = task()
    teacher = net().eval()
    with torch.no_grad():
        teacher[3].weight *= 8  # outputs that are worth learning
    teacher[2].p = 0.0
    cut = prune(teacher, [x], Sparsity(0.6), refit="layers", progress=False)

    def distance(model):
        was = model.training
        model.eval()
        with torch.no_grad():
            far = float(distillation()(model(x), teacher(x)))
        model.train(was)
        return far

    done = retrain(
        cut.model,
        cut.masks,
        [x[:120], x[120:]],
        teacher=teacher,
        iterations=150,
        evaluate=distance,
        progress=False,
    )
    assert done.error < 0.5 * done.history[0][1]
    assert not teacher.training and zeros_held(done.model, cut.masks)


def test_distillation_vanishes_only_on_equal_outputs():
    z = torch.randn(5, 4)
    loss = distillation(3.0)
    assert abs(float(loss(z, z))) < 1e-6 and float(loss(z, z + torch.randn(5, 4))) > 0.01
    assert abs(float(loss(z + 7.0, z))) < 1e-5  # softmax does not see a constant


def test_the_learning_rate_falls_as_asked():
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    cut = pruned()
    for decay, last in (
        ("constant", 1.0),
        ("linear", 0.1),
        ("cosine", 0.5 + 0.5 * torch.cos(torch.tensor(0.9 * torch.pi)).item()),
    ):
        seen.clear()
        make = lambda p: Watched(p, 0.2)  # noqa: E731
        retrain(
            cut.model,
            cut.masks,
            Shuffled(*task(), 24),
            optimizer=make,
            decay=decay,
            iterations=10,
            progress=False,
        )
        assert seen[0] == 0.2 and seen[-1] == pytest.approx(0.2 * last) and len(seen) == 10


def test_torchs_generator_and_every_mode_are_left_alone():
    cut = pruned()
    cut.model.eval()
    cut.model[2].train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    done = retrain(
        cut.model, cut.masks, Shuffled(*task(), 24), iterations=5, inplace=True, progress=False
    )
    assert torch.equal(torch.rand(3), expected)
    assert done.model is cut.model and not cut.model.training and cut.model[2].training


def test_mistakes_are_named():
    cut, x = pruned(), task()[0]
    for arguments, message in (
        ({"iterations": -1}, "0 or more"),
        ({"decay": "step"}, "use constant, linear, cosine"),
        ({"until_error": 1.0}, "until_error needs evaluate"),
        ({"optimizer": sgd(1e9), "iterations": 50}, "Use a smaller learning rate"),
    ):
        with pytest.raises(LobsError, match=message):
            retrain(cut.model, cut.masks, Shuffled(*task(), 24), progress=False, **arguments)
    with pytest.raises(LobsError, match="not a generator"):
        retrain(cut.model, cut.masks, iter([task()]), progress=False)
    with pytest.raises(LobsError, match="no batches"):
        retrain(cut.model, cut.masks, [], progress=False)
    with pytest.raises(LobsError, match="do not make batches"):
        Shuffled(x, task()[1], 1000)


def stages():
    return [Stage(Sparsity(0.4, scope="layer"), 20), Stage(Sparsity(0.7, scope="layer"), 30)]


def test_stages_reach_their_counts_and_hold_their_zeros():
    x, y = task()
    run = {"evaluate": wrong, "retraining": {"optimizer": sgd(0.1)}, "progress": False}
    done = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    assert [s.kept for s in done.stages] == [128 - 38 - 13, 128 - 67 - 22] and done.iterations == 50
    assert (
        sum(int(m.sum()) for n, m in done.masks.items() if n.endswith("weight"))
        == done.stages[-1].kept
    )
    assert zeros_held(done.model, done.masks)
    assert all(s.pruned_error is not None and s.error == s.history[-1][1] for s in done.stages)


def test_stages_that_cannot_be_meant_are_refused_before_anything_is_pruned(monkeypatch):
    x, y = task()
    monkeypatch.setattr("lobs.training.staged.prune", lambda *_, **__: pytest.fail("pruned"))
    for plan, more, words in (
        (
            [Stage(0.9, 5), Stage(0.5, 5)],
            {},
            "a stage keeps 0.5 of the network after one that kept 0.1",
        ),
        ([Stage(0.5, 5)], {"decay": "slow"}, "decay is 'slow'"),
        ([Stage(0.5, 5, until_error=1.0)], {}, "until_error needs evaluate"),
        (
            [Stage(Budget(parameters=10)), Stage(Budget(parameters=50))],
            {},
            "keeps 50 weights after one that kept 10",
        ),
        ([Stage(0.5, 5), Stage(Budget(bytes=1))], {}, "what cannot be removed"),
        ([Stage(0.5, "5")], {}, "iterations = '5'"),
        ([0.5], {}, "give a list such as"),
        ([Stage(0.5, 5)], {"until_error": 3}, "retraining has 'until_error'"),
    ):
        with pytest.raises(LobsError, match=words):
            prune_in_stages(
                net(), [(x, y)], Shuffled(x, y, 24), plan, retraining=more, progress=False
            )


def test_stages_that_stay_or_come_from_a_generator_are_taken():
    x, y = task()
    plan = (Stage(removed, 2) for removed in (0.93, 1 - 0.07))  # not the same float
    assert (
        prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), plan, progress=False).iterations == 4
    )


def test_a_folder_of_stages_knows_how_they_were_retrained(tmp_path):
    x, y = task()

    def run(rate):
        settings = {"optimizer": sgd(rate)}
        return prune_in_stages(
            net(),
            [(x, y)],
            Shuffled(x, y, 24),
            [Stage(0.5, 5)],
            retraining=settings,
            folder=tmp_path,
            progress=False,
        )

    assert equal(run(0.05).model, run(0.05).model)
    with pytest.raises(LobsError, match="holds another way of retraining"):
        run(5.0)


def test_one_stage_is_pruning_then_retraining():
    x, y = task()
    done = prune_in_stages(
        net(), [(x, y)], Shuffled(x, y, 24), [Stage(Sparsity(0.5), 25)], progress=False
    )
    cut = pruned()
    assert equal(
        done.model,
        retrain(cut.model, cut.masks, Shuffled(x, y, 24), iterations=25, progress=False).model,
    )


def test_stages_with_a_fixed_inverse_only_shrink_their_masks():
    x, y = task()
    run = {"pruning": {"solver": "lobs", "inputs": "dense"}, "progress": False}
    first = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    both = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    assert all(bool((first.masks[name] | ~mask).all()) for name, mask in both.masks.items())


def test_interrupted_stages_go_on_where_they_were(tmp_path):
    x, y = task()
    run = {"evaluate": wrong, "progress": False}
    whole = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages()[:1], folder=tmp_path, **run)
    before = (tmp_path / "stage-1.safetensors").stat().st_mtime_ns
    again = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), folder=tmp_path, **run)
    assert equal(again.model, whole.model) and again.stages == whole.stages
    assert (tmp_path / "stage-1.safetensors").stat().st_mtime_ns == before and not list(
        tmp_path.glob("*.state")
    )
    with pytest.raises(LobsError, match="holds another stage"):
        prune_in_stages(
            net(), [(x, y)], Shuffled(x, y, 24), [Stage(Sparsity(0.2), 20)], folder=tmp_path, **run
        )


def test_finished_stages_of_another_network_or_another_solver_are_refused(tmp_path):
    x, y = task()
    run = {"folder": tmp_path, "progress": False}
    prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    other = net()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    with pytest.raises(LobsError, match="holds another network"):
        prune_in_stages(other, [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    with pytest.raises(LobsError, match="holds another way of pruning"):
        prune_in_stages(
            net(),
            [(x, y)],
            Shuffled(x, y, 24),
            stages()[:1],
            pruning={"solver": "magnitude"},
            **run,
        )


def test_no_stages_is_a_mistake():
    with pytest.raises(LobsError, match="no stages"):
        prune_in_stages(net(), [task()], [task()], [], progress=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"masks": None}, "masks is a NoneType: give a mapping"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)},
            "optimizer is a SGD: give a function that makes one",
        ),
        ({"data": [torch.randn(8, 6)]}, "a Tensor without labels"),
        (
            {"data": [(torch.randn(8, 6), torch.zeros(7).long())]},
            r"outputs of shape \(8, 2\) and labels of shape \(7,\) raised",
        ),
        (
            {"data": [(torch.randn(8, 6), torch.full((8,), 9))]},
            "raised IndexError: Target 9 is out of bounds",
        ),
        (
            {"data": [(torch.full((8, 6), torch.nan), torch.zeros(8).long())]},
            "after 0 iterations. Check the network and the first",
        ),
    ],
)
def test_what_cannot_be_trained_on_says_what_to_give(change, says):
    result, (x, y) = pruned(), task()
    given = {
        "model": result.model,
        "masks": result.masks,
        "data": [(x, y)],
        "iterations": 2,
        "progress": False,
        **change,
    }
    with pytest.raises(LobsError, match=says):
        retrain(**given)
