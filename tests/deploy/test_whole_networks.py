"""Accelerated networks: shared inputs, stored types, released weights, real architectures."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError
from lobs.deploy.accelerate.modules import FastLinear
from lobs.deploy.accelerate.native import this_form
from lobs.deploy.accelerate.native_engines import BitmaskEngine, PlanesEngine, SlotsEngine
from lobs.deploy.accelerate.norms import FoldedConv, FoldedDense, FoldedNorm
from lobs.deploy.accelerate.packed import Packed
from lobs.deploy.accelerate.shared import SharedInput, SharedPart

from .test_engines import assert_close, sparse

WITH_SLOTS = pytest.mark.skipif(this_form() != "avx512", reason="slots need AVX-512")


@pytest.fixture
def prefer(monkeypatch):
    """Let named implementations win, whatever the clock says."""

    def choose(*names):
        def turns(contenders, *_, **__):
            return {n: np.full(5, 1.0 if n in (*names, "fast") else 2.0) for n in contenders}

        for room in ("layerwise", "fusing", "acceleration"):
            monkeypatch.setattr(f"lobs.deploy.accelerate.{room}.take_turns", turns)

    return choose


class Attention(nn.Module):
    """Three projections of one input, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight
        self.q, self.k, self.v = nn.Linear(40, 40), nn.Linear(40, 24), nn.Linear(40, 24, False)
        self.out = nn.Linear(88, 40)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.out(torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)))


def attention(kept=0.5):
    model = Attention().eval()
    for layer in (model.q, model.k, model.v, model.out):
        sparse(layer, kept)
    return model


IDS = torch.tensor([[3, 7, 11]])


def test_layers_that_read_one_input_are_one_call(prefer):
    prefer("bitmask", "shared")
    model = attention()
    done = lobs.accelerate(model, IDS, progress=False)
    parts = [done.model.q, done.model.k, done.model.v]
    assert all(isinstance(m.engine, SharedPart) for m in parts)
    assert len({id(m.engine.owner) for m in parts}) == 1
    assert isinstance(done.model.out.engine, BitmaskEngine) and "shared" in done.summary()
    calls = []
    engine = parts[0].engine.owner.engine
    run, engine.run = engine.run, lambda *a: calls.append(1) or run(*a)
    for _ in range(2):
        assert_close(done.model(IDS), model(IDS))
    assert len(calls) == 2
    with torch.inference_mode():
        assert_close(done.model(IDS), model(IDS))


@WITH_SLOTS
def test_slots_share_inputs_and_release_weights(prefer):
    prefer("slots", "shared")
    model = attention(0.2)
    done = lobs.accelerate(model, IDS, progress=False, release_dense=True)
    parts = [done.model.q, done.model.k, done.model.v]
    assert all(type(m.engine.owner.engine) is SlotsEngine for m in parts)
    assert type(done.model.out.engine) is SlotsEngine and isinstance(parts[0], Packed)
    assert parts[0].engine.name == "slots, shared"
    for ids in (IDS, torch.randint(50, (5, 30))):
        assert_close(done.model(ids), model(ids))
    with torch.inference_mode():  # nothing can be kept for the other layers
        assert_close(done.model(IDS), model(IDS))
    other = attention(0.1)
    done.model.load_state_dict(other.state_dict())
    assert_close(done.model(IDS), other(IDS))


def test_a_shared_call_is_never_stale(prefer):
    prefer("bitmask", "shared")
    model = attention()
    fast = lobs.accelerate(model, IDS, progress=False).model
    x, other = torch.randn(1, 3, 40), torch.randn(1, 3, 40)
    with torch.no_grad():
        for order in ((x, x, other), (x, other, x), (other, x, x)):
            for name, given in zip("qkv", order, strict=True):
                assert_close(getattr(fast, name)(given), getattr(model, name)(given))
        fast.q(x)
        x.mul_(2)
        assert_close(fast.k(x), model.k(x))
        fast.q(x)
        fast.v.weight.mul_(3)
        assert_close(fast.v(x), 3 * model.v(x))
        assert_close(fast.q(x), model.q(x))
        assert_close(fast.q(x), model.q(x))  # twice with one input
    twin = copy.deepcopy(fast)
    assert twin.q.engine.owner is twin.k.engine.owner is not fast.q.engine.owner
    assert isinstance(twin.q.engine.owner, SharedInput)
    twin.q.weight.zero_()
    assert_close(twin.q(x), model.q.bias.expand(1, 3, 40))
    assert_close(fast.q(x), model.q(x))


@pytest.mark.parametrize("names", [("bitmask", "shared"), ("bitmask",), ("planes",)], ids=str)
def test_released_weights(prefer, names):
    prefer(*names)
    model = sparse(attention(), 0.2) if names == ("planes",) else attention()
    model.head.weight = model.embed.weight = nn.Parameter(torch.randn(50, 40))
    done = lobs.accelerate(model, IDS, progress=False, release_dense=True)
    fast = done.model
    assert all(isinstance(getattr(fast, n), Packed | nn.Linear) for n in ("q", "k", "v", "out"))
    assert isinstance(fast.q, Packed) and isinstance(fast.out, Packed)
    assert "weight" not in dict(fast.q.named_parameters()) and "packed" in repr(fast.q)
    assert type(fast.head) is nn.Linear and fast.head.weight is fast.embed.weight
    many = torch.randint(50, (5, 30))
    for ids in (IDS, many, many[:1, :17]):
        assert_close(fast(ids), model(ids))
    state = fast.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in state.items())
    x = torch.randn(2, 40, requires_grad=True)
    fast.q(x).sum().backward()
    assert torch.allclose(x.grad, model.q.weight.sum(0).expand(2, 40), atol=1e-5)
    assert fast.q.to(torch.float64)(x.double()).dtype == torch.float64


def test_released_weights_are_copied_loaded_and_missed(prefer):
    prefer("bitmask", "shared")
    model, other = attention(), attention()
    fast = lobs.accelerate(model, IDS, progress=False, release_dense=True).model
    twin = copy.deepcopy(fast)
    twin.load_state_dict(other.state_dict())
    assert_close(twin(IDS), other(IDS))
    assert_close(fast(IDS), model(IDS))
    rest = {n: t for n, t in model.state_dict().items() if n != "k.weight"}
    with pytest.raises(RuntimeError, match=r"k\.weight"):
        fast.load_state_dict(rest)


@pytest.mark.parametrize("engine", ["bitmask", pytest.param("slots", marks=WITH_SLOTS)])
@pytest.mark.parametrize("values", ["float16", "bfloat16", "int8", "int4"])
def test_values_of_fewer_bits(prefer, values, engine):
    prefer(engine)
    model = attention(0.4 if engine == "slots" else 0.5)
    done = lobs.accelerate(model, IDS, values=values, progress=False)
    assert isinstance(done.model.q, FastLinear) and done.model.q.engine.storage == values
    assert done.model.q.engine.name == engine
    plain = Attention().eval()
    plain.head.weight = nn.Parameter(torch.zeros(50, 40))
    plain.load_state_dict(done.model.state_dict())  # the rounded weights, computed densely
    assert_close(done.model(IDS), plain(IDS))
    assert 0 < done.change < {"float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2, "int4": 0.4}[values]
    assert torch.equal(done.model.embed.weight, model.embed.weight)  # a tied head is rounded alone


def test_values_that_cannot_be_stored_are_refused(prefer):
    prefer("bitmask")
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(LobsError, match="values is 'float8'"):
        lobs.accelerate(model, torch.randn(1, 8), values="float8")
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    with pytest.raises(LobsError, match=r"cannot hold weights up to 1e\+06: use values='bfloat16'"):
        lobs.accelerate(model, torch.randn(1, 8), values="float16", progress=False)


def test_many_inputs_run_as_planes(prefer):
    prefer("planes")
    model, x = sparse(nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 7))), None
    for x in (torch.randn(4, 9, 30), torch.randn(30, 9).T, torch.randn(9, 60)[:, ::2]):
        done = lobs.accelerate(model, x, progress=False)
        assert isinstance(done.model[0].engine, PlanesEngine)
        assert_close(done.model(x), model(x))


def test_transformers_conv1d(prefer):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    prefer("bitmask")
    layer, x = sparse(conv1d(20, 30), 0.4), torch.randn(2, 30)
    model = nn.Sequential(layer)
    done = lobs.accelerate(model, x, progress=False)
    assert isinstance(done.model[0], conv1d) and done.layers[0].chosen == "bitmask"
    assert_close(done.model(x), model(x))
    fast = lobs.accelerate(model, x, progress=False, release_dense=True).model
    assert_close(fast(x), model(x))
    assert torch.equal(fast.state_dict()["0.weight"], layer.weight)


def test_generation_gives_the_same_tokens(prefer):
    """A tiny random decoder: long prompts and single tokens, dense weights kept or released."""
    transformers = pytest.importorskip("transformers")
    prefer("bitmask", "shared")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                sparse(layer, 0.5)
    prompt = torch.randint(64, (1, 24))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    for release in (False, True):
        done = lobs.accelerate(
            model, {"input_ids": prompt[:, :1]}, progress=False, release_dense=release
        )
        assert torch.equal(done.model.generate(prompt, **options), expected)
        kinds = {type(m.engine) for m in done.model.modules() if hasattr(m, "engine")}
        assert kinds == {BitmaskEngine, SharedPart}


class Normed(nn.Module):
    """Convolutions with batch norms: plain, read twice, depthwise, without affine weights."""

    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.c, self.nc = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False)
        self.d, self.nd = nn.Conv2d(8, 4, 3, stride=2), nn.BatchNorm2d(4)
        for norm in (self.na, self.nb, self.nc, self.nd):
            norm.running_mean, norm.running_var = torch.randn_like(norm.running_mean), None
            norm.running_var = torch.rand(norm.num_features) + 0.5

    def forward(self, x):
        x = torch.relu(self.nb(self.b(torch.relu(self.na(self.a(x))))))
        y = self.c(x)
        return self.nd(self.d(self.nc(y) + y))  # y is read twice: nothing to fold


@pytest.mark.parametrize("kinds", [("folded",), ("folded", "compiled")], ids=str)
def test_batch_norms_are_folded(prefer, kinds):
    prefer(*kinds)
    model, x = Normed().eval(), torch.randn(2, 3, 12, 12)
    for conv in (model.a, model.b, model.c, model.d):
        sparse(conv, 0.5)
    done = lobs.accelerate(model, x, progress=False)
    fast = done.model
    assert [isinstance(m, FoldedNorm) for m in (fast.na, fast.nb, fast.nc, fast.nd)] == [
        True, True, False, True,
    ]  # fmt: skip
    kind = FoldedConv if "compiled" in kinds else FoldedDense
    assert all(type(m.engine) is kind for m in (fast.a, fast.b, fast.d))
    assert "folded" in done.summary() and getattr(fast.c, "engine", None).__class__ is not kind
    with torch.no_grad():
        assert_close(fast(x), model(x))
        assert list(fast.state_dict()) == list(model.state_dict())
        assert_close(fast(x.double().float()[:, :, :11]), model(x[:, :, :11]))
        twin = copy.deepcopy(fast)
        other = Normed().eval()
        twin.load_state_dict(other.state_dict())  # weights and statistics follow
        assert_close(twin(x), other(x))
        assert_close(fast(x), model(x))
        seen = []
        handle = fast.a.register_forward_hook(lambda m, args, out: seen.append(out))
        assert_close(fast(x), model(x))
        assert_close(seen[0], model.a(x))  # hooks see what they always saw
        handle.remove()
        assert_close(fast.double()(x.double()).float(), model(x))
    fast = lobs.accelerate(model, x, progress=False).model.train()
    reference = copy.deepcopy(model).train()
    assert_close(fast(x), reference(x))
    assert torch.allclose(fast.na.running_mean, reference.na.running_mean)


def test_a_shared_batch_norm_is_not_folded(prefer):
    prefer("folded")
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.Conv2d(3, 3, 3), norm).eval()
    x = torch.randn(2, 3, 9, 9)
    fast = lobs.accelerate(model, x, progress=False).model
    assert not any(isinstance(m, FoldedNorm) for m in fast.modules())
    with torch.no_grad():
        assert_close(fast(x), model(x))
