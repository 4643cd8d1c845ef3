"""Retraining: zeros stay zero, runs are resumed to the bit, mistakes are named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lobs import Execution, LobsError, Sparsity, prune, retrain
from lobs.training import Shuffled, distillation, sgd


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


def score(model):
    return -wrong(model)


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


def test_training_raises_the_score_and_stops_once_it_is_high_enough():
    cut = pruned()
    run = {
        "optimizer": sgd(0.1),
        "iterations": 600,
        "evaluate": score,
        "every": 10,
        "progress": False,
    }
    whole = retrain(cut.model, cut.masks, Shuffled(*task(), 24), **run)
    assert whole.score > whole.history[0][1] + 5 and whole.reached is None
    wanted = whole.history[0][1] + 5
    early = retrain(cut.model, cut.masks, Shuffled(*task(), 24), until_score=wanted, **run)
    assert early.reached and early.score >= wanted and early.iterations < 600
    assert early.history == whole.history[: len(early.history)]
    never = retrain(
        cut.model, cut.masks, Shuffled(*task(), 24), until_score=1.0, **{**run, "iterations": 30}
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
            evaluate=score,
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
    whole = retrain(cut.model, cut.masks, data, evaluate=score, **run)

    looks = 0

    def interrupted(model):
        nonlocal looks
        looks += 1
        if looks == stop // 5 + 2:
            raise KeyboardInterrupt
        return score(model)

    resume = Execution(resume=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        retrain(cut.model, cut.masks, data, evaluate=interrupted, execution=resume, **run)
    again = retrain(cut.model, cut.masks, data, evaluate=score, execution=resume, **run)
    assert equal(again.model, whole.model) and again.history == whole.history
    assert equal(
        retrain(cut.model, cut.masks, data, evaluate=score, execution=resume, **run).model,
        whole.model,
    )


def test_a_state_of_another_run_is_refused(tmp_path):
    cut, resume = pruned(), Execution(resume=tmp_path / "run")
    retrain(
        cut.model, cut.masks, Shuffled(*task(), 24), iterations=5, execution=resume, progress=False
    )
    with pytest.raises(LobsError, match="belongs to a run with iterations = 5, not 6"):
        retrain(
            cut.model,
            cut.masks,
            Shuffled(*task(), 24),
            iterations=6,
            execution=resume,
            progress=False,
        )
    with pytest.raises(LobsError, match="belongs to a run with masks"):
        other = pruned(0.3)
        retrain(
            other.model,
            other.masks,
            Shuffled(*task(), 24),
            iterations=5,
            execution=resume,
            progress=False,
        )
    cut.save(tmp_path / "run" / "training.safetensors")
    with pytest.raises(LobsError, match="is not a training state"):
        retrain(cut.model, cut.masks, Shuffled(*task(), 24), execution=resume, progress=False)


def test_a_teacher_needs_no_labels():
    x, _ = task()
    teacher = net().eval()
    with torch.no_grad():
        teacher[3].weight *= 8  # outputs that are worth learning
    teacher[2].p = 0.0
    cut = prune(teacher, [x], Sparsity(0.6), refit="layers", progress=False)

    def nearness(model):
        was = model.training
        model.eval()
        with torch.no_grad():
            far = float(distillation()(model(x), teacher(x)))
        model.train(was)
        return -far

    done = retrain(
        cut.model,
        cut.masks,
        [x[:120], x[120:]],
        teacher=teacher,
        iterations=150,
        evaluate=nearness,
        progress=False,
    )
    assert done.score > 0.5 * done.history[0][1]
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
        ({"until_score": 1.0}, "until_score needs evaluate"),
        ({"optimizer": sgd(1e9), "iterations": 50}, "Use a smaller learning rate"),
    ):
        with pytest.raises(LobsError, match=message):
            retrain(cut.model, cut.masks, Shuffled(*task(), 24), progress=False, **arguments)
    with pytest.raises(
        LobsError, match="data is a list_iterator, and training reads it many times"
    ):
        retrain(cut.model, cut.masks, iter([task()]), progress=False)
    with pytest.raises(LobsError, match="no batches"):
        retrain(cut.model, cut.masks, [], progress=False)
    with pytest.raises(LobsError, match="do not make batches"):
        Shuffled(x, task()[1], 1000)


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"checkpoint": "x"}, r"execution=lobs\.Execution\(resume=…\), a folder"),
        ({"until_error": 1.0}, r"until_score=…; evaluate returns a score, larger is better"),
        ({"rate": 1.0}, "one of loss, optimizer, decay, every, teacher, seed"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_the_right_one(change, says):
    cut = pruned()
    with pytest.raises(TypeError, match=says):
        retrain(cut.model, cut.masks, [task()], progress=False, **change)


@pytest.mark.parametrize(
    "execution", [Execution(memory="1GB"), Execution(distributed=True), Execution(diagnostics=True)]
)
def test_execution_that_training_cannot_honour_is_refused(execution):
    cut = pruned()
    with pytest.raises(
        LobsError, match=r"does not support Execution\(.*It supports resume and log"
    ):
        retrain(cut.model, cut.masks, [task()], execution=execution, progress=False)
    with pytest.raises(LobsError, match=r"execution is 'run': give lobs\.Execution"):
        retrain(cut.model, cut.masks, [task()], execution="run", progress=False)


def test_training_writes_its_phases_to_the_log(tmp_path):
    cut, log = pruned(), tmp_path / "log.jsonl"
    retrain(
        cut.model,
        cut.masks,
        [task()],
        iterations=3,
        execution=Execution(log=log),
        progress=False,
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["event"], line["phase"]) for line in lines] == [
        ("begin", "retrain"),
        ("end", "retrain"),
    ]


def test_an_optimizer_of_another_network_is_refused():
    cut, other = pruned(), net()
    with pytest.raises(LobsError, match=r"none of the masked parameters, such as '0\.weight'"):
        retrain(
            cut.model,
            cut.masks,
            [task()],
            optimizer=lambda _: torch.optim.SGD(other.parameters(), 0.1),
            progress=False,
        )


def test_what_training_gives_back_shows_no_tensors():
    cut = pruned()
    done = retrain(cut.model, cut.masks, [task()], iterations=2, evaluate=score, progress=False)
    assert repr(done).startswith("Retraining(2 iterations, score -")
    assert repr(Shuffled(*task(), 24)) == "Shuffled(240 samples, batch_size=24)"


def test_a_score_that_leaves_the_network_in_eval_mode_does_not_change_training():
    modes = []

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            modes.append(self.training)
            return self.fc(x)

    def leaves_eval(model):
        model.eval()
        return 0.0

    model, data = Noted(), [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)]
    masks = {"fc.weight": torch.ones(3, 4, dtype=torch.bool)}
    retrain(model, masks, data, iterations=6, evaluate=leaves_eval, every=2, progress=False)
    assert modes and all(modes)
