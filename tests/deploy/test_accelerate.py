from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError
from lobs.deploy.accelerate import fusing, median, speedup, take_turns
from lobs.deploy.accelerate.engines import ChainEngine
from lobs.deploy.accelerate.modules import FastConv2d, FastLinear, FastSequential, same_as

from .test_engines import assert_close, sparse


def mlp():
    return sparse(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 300),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        ),
        keep=0.03,
    )


def cnn():
    return sparse(
        nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 49, 200),
            nn.ReLU(),
            nn.Linear(200, 10),
        ),
        keep=0.03,
    )


@pytest.fixture
def decided(monkeypatch):
    """Let the compiled kernel win, whatever the clock says: what is tested here is what follows."""

    def turns(contenders, *_, **__):
        return {
            name: np.full(5, 1.0 if name in ("compiled", "fast") else 2.0) for name in contenders
        }

    for room in ("layerwise", "fusing", "acceleration"):
        monkeypatch.setattr(f"lobs.deploy.accelerate.{room}.take_turns", turns)


@pytest.mark.parametrize(("build", "shape"), [(mlp, (1, 28, 28)), (cnn, (3, 16, 16))])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_accelerated_network_answers_the_same(decided, build, shape, batch):
    model, x = build(), torch.randn(batch, *shape)
    before = copy.deepcopy(model.state_dict())
    done = lobs.accelerate(model, x)
    assert_close(done.model(x), model(x))
    assert any(isinstance(m, FastSequential) for m in done.model.modules())
    assert type(model[-1]) is nn.Linear  # the user's own is untouched
    assert list(done.model.state_dict()) == list(before)
    assert all(torch.equal(t, before[n]) for n, t in done.model.state_dict().items())
    assert "2.00" in done.summary() and "crossover" in done.summary()
    twin = copy.deepcopy(done.model)
    assert_close(twin(x), model(x))
    twin.load_state_dict(build().state_dict())
    assert_close(twin(x), same_dense(twin)(x))


def same_dense(model):
    dense = mlp() if isinstance(model[1], nn.Linear) else cnn()
    dense.load_state_dict(model.state_dict())
    return dense


def test_layers_outside_sequentials_and_in_keyword_models(decided):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc, self.unused = (
                nn.Conv2d(1, 4, 3),
                nn.Linear(4 * 36, 5),
                nn.Linear(2, 2),
            )

        def forward(self, images, scale):
            return {"out": scale * self.fc(torch.relu(self.conv(images)).flatten(1))}

    model, example = sparse(Net()), {"images": torch.randn(4, 1, 8, 8), "scale": torch.tensor(2.0)}
    done = lobs.accelerate(model, example)
    assert isinstance(done.model.conv, FastConv2d) and isinstance(done.model.fc, FastLinear)
    assert type(done.model.unused) is nn.Linear
    assert_close(done.model(**example)["out"], model(**example)["out"])


def test_hooked_and_foreign_layers_are_left_alone(decided):
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = sparse(nn.Sequential(Own(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).double()))
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    model = model[:2]
    done = lobs.accelerate(model, torch.randn(4, 8))
    assert not done.layers and "stays dense" in done.note and len(seen) > 0
    assert_close(done.model(torch.ones(4, 8)), model(torch.ones(4, 8)))


def test_never_slower(monkeypatch):
    """If the compiled kernel wins in every layer but not in the whole network, dense stays."""

    def turns(contenders, *_, **__):
        return {
            name: np.full(5, 1.0 if name == "compiled" else 3.0 if name == "fast" else 2.0)
            for name in contenders
        }

    for room in ("layerwise", "fusing", "acceleration"):
        monkeypatch.setattr(f"lobs.deploy.accelerate.{room}.take_turns", turns)
    done = lobs.accelerate(mlp(), torch.randn(2, 784))
    assert "stays dense" in done.note and done.speedup.middle == 1
    assert not any(isinstance(m, FastLinear | FastSequential) for m in done.model.modules())


def test_a_dense_network_stays_dense():
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))
    done = lobs.accelerate(model, torch.randn(32, 300), seconds=0.05)
    assert all(row.chosen == "dense" for row in done.layers)


def test_which_stretches_are_fused():
    linear, relu = nn.Linear(4, 4), nn.ReLU()
    assert fusing.runs_of_linear(nn.Sequential(nn.Flatten(), linear, relu, linear)) == [(0, 4)]
    assert fusing.runs_of_linear(nn.Sequential(relu, linear, relu, nn.Tanh(), linear)) == [(1, 3)]
    assert fusing.runs_of_linear(nn.Sequential(nn.Conv2d(1, 1, 1), relu, nn.Flatten(), linear)) == [
        (2, 4)
    ]
    assert fusing.runs_of_linear(nn.Sequential(nn.Flatten(), relu, linear)) == []
    assert fusing.runs_of_linear(nn.Sequential(linear, nn.Flatten(), linear, relu)) == [(1, 4)]
    assert fusing.runs_of_linear(nn.Sequential()) == []


def test_examples_that_cannot_be_run_are_refused():
    with pytest.raises(LobsError, match="type str"):
        lobs.accelerate(nn.Linear(2, 2), "x")


def test_export_and_tracing_give_the_dense_graph(decided):
    model, x = mlp(), torch.randn(2, 784)
    fast = lobs.accelerate(model, x).model
    program = torch.export.export(fast, (x,))
    assert_close(program.module()(x), model(x))


def test_intervals_hold_the_truth():
    rng = np.random.default_rng(1)
    slow, fast = rng.gamma(9, 2, 400), rng.gamma(9, 1, 400)
    ratio = speedup(slow, fast)
    assert ratio.low < 2 < ratio.high and ratio.low < ratio.middle < ratio.high
    assert median(np.full(7, 3.0)).low == 3.0
    assert f"{median(np.full(7, 3.0)):.1f}" == "3.0 [3.0, 3.0]"


def test_contenders_take_turns():
    order = []
    taken = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 0.0)
    assert len(taken["a"]) == len(taken["b"]) == 5 and (taken["a"] > 0).all()


def _fused():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 8)).eval()
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight.mul_(torch.rand_like(layer.weight) < 0.02)
    x = torch.randn(4, 64)
    fast = same_as(
        FastSequential, copy.deepcopy(model)
    )  # whatever is fastest here: the fused run is what this is about
    fast.runs = [(0, 4, ChainEngine([fast[0], fast[3]], [True, False], x))]
    return model, fast, x


def test_hooks_and_dropout_inside_a_fused_run_are_as_in_the_dense_network():
    model, fast, x = _fused()
    seen = []
    handle = fast[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert seen
        handle.remove()
        fast[2].train()
        assert not torch.equal(fast(x), fast(x))


def test_forward_mode_and_vmap_are_left_to_dense_torch():
    model, fast, x = _fused()
    direction = torch.randn_like(x)
    ours, theirs = (torch.func.jvp(net, (x,), (direction,))[1] for net in (fast, model))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.func.vmap(fast)(x), model(x))


def test_a_network_can_be_accelerated_in_inference_mode():
    model, _, x = _fused()
    with torch.inference_mode():
        torch.testing.assert_close(lobs.accelerate(model, x).model(x), model(x))
