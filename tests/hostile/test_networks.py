"""Hostile networks: pruned rightly or refused in words, and never left half-written."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import lobs
from lobs import Block, Budget, ErrorBudget, LobsError, NByM, Sparsity, Structured
from tests.hostile import networks
from tests.hostile.running import faults

PRUNED = set()  # seeds that ended in a pruned network
TARGETS = [
    Sparsity(0), Sparsity(1), Sparsity(0.5), Sparsity(0.5), Sparsity(0.5), Sparsity(0.9),
    Sparsity(0.5, scope="layer"), Sparsity(1.0, scope="layer"), Sparsity({"*": 0.5}),
    Sparsity({"0": 0.5}), Sparsity({"no such": 0.5}), ErrorBudget(0.2, relative=True),
    ErrorBudget(0), ErrorBudget(1e30), Budget(parameters=10), Budget(parameters=10**9),
    Budget(bytes=100), Budget(flops=50), Budget(drop=0.1, evaluate=lambda m: 1.0), NByM(2, 4),
    Block(0.5), Structured(0.5), Structured(0.5, "inputs"),
] * 2 + [0.5, 1, float("nan"), "half", None, -1]  # fmt: skip


def sometimes(rng, odd):
    """A value for each name in one case of ten."""
    return {name: rng.choice(values) for name, values in odd.items() if rng.random() < 0.1}


def options(rng):
    """Options of `prune`, as functions: what a constructor refuses counts as refused."""
    solvers = ["greedy", "lobs", "magnitude", "admm", "apozw", "obd-fisher", "random", "no such"]
    chosen = sometimes(
        rng,
        {
            "inputs": ["dense", "pruned", "asymmetric", "none of these"],
            "solver": solvers,
            "inplace": [True],
            "layers": ["*", ["0"], "no such", []],
            "skip": ["0", ["*"], "no such"],
        },
    )
    numbers = {
        "prune_bias": [True],
        "damping": [0.0, 1e-3, -1.0, float("nan")],
        "batch_norm": [False],
    }
    numerics, diagnostics = sometimes(rng, numbers), rng.random() < 0.15
    return lambda: {
        **chosen,
        "progress": False,
        "numerics": lobs.Numerics(**numerics),
        "execution": lobs.Execution(diagnostics=diagnostics),
    }


def target_of(rng):
    """A target, as a function."""
    target = rng.choice(TARGETS)
    if not isinstance(target, Sparsity | Budget):
        return lambda: target
    scores = [lambda m: 1.0, lambda m: float("nan"), lambda m: "good", lambda m: 1 / 0]
    changes = {"rounds": 1, **sometimes(rng, {"rounds": [2, 0, "x"]})}
    if isinstance(target, Budget):
        changes |= sometimes(rng, {"evaluate": scores})
    return lambda: replace(target, **changes)


def drawn(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = rng.choice(networks.CHANGES)(rng.choice(networks.BODIES)())
    dtype = next(
        (
            p.dtype
            for p in model.parameters()
            if not isinstance(p, nn.parameter.UninitializedParameter)
        ),
        torch.float32,
    )
    kind = "good" if rng.random() < 0.5 else rng.choice(networks.KINDS)
    data = networks.batches_of(rng, generator, kind, dtype)
    batches = rng.choice(networks.CONTAINERS)(data)
    if isinstance(model, networks.Keyed) and rng.random() < 0.7:
        batches = [{"values": x} for x in data]
    return model, batches, target_of(rng), options(rng)


def state(model):
    """Everything of the user's that must not change."""
    lazy = nn.parameter.UninitializedParameter
    numbers = {
        n: t.detach().clone()
        for n, t in model.state_dict().items()
        if not t.is_meta and not isinstance(t, lazy)
    }
    modes = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    ]
    return numbers, modes, [p.requires_grad for p in model.parameters()]


def same(before, after):
    return before[1:] == after[1:] and all(
        torch.equal(t.nan_to_num(7.0), after[0][n].nan_to_num(7.0)) for n, t in before[0].items()
    )


def wrong(seed):
    model, batches, make_target, make_options = drawn(seed)
    before = state(model)
    target, chosen = make_target(), make_options()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        result = lobs.prune(model, batches, target, **chosen)
    except LobsError:
        if not same(before, state(model)):
            return "an error left the network changed"
        raise
    after = result.model.state_dict()
    now = state(model)
    laws = {
        "the network was written to": chosen.get("inplace", False) or same(before, now),
        "hooks or modes were left": before[1:] == now[1:],
        "torch's fast path was left off": torch.backends.mha.get_fastpath_enabled() == fast_path,
        "weights are not finite": all(bool(torch.isfinite(after[n]).all()) for n in result.masks),
        "masks are not obeyed": all(
            bool((after[n][~m] == 0).all()) for n, m in result.masks.items()
        ),
        "the same model is not given back": not chosen.get("inplace") or result.model is model,
        "the summary has no lines": len(result.summary().splitlines()) > 2,
    }
    if isinstance(target, Sparsity) and target.scope == "network":
        gone = int(target.fraction * result.total + 0.5)
        laws["another count went"] = result.total - result.kept == gone
    PRUNED.add(seed)
    return "; ".join(fault for fault, holds in laws.items() if not holds)


@pytest.mark.parametrize("start", range(0, 300, 75))
def test_a_hostile_network_is_pruned_or_refused_and_never_half_written(start):
    seeds = range(start, start + 75)
    assert faults(wrong, seeds) == {}
    assert len(PRUNED & {*seeds}) >= 5  # refusing everything would prove nothing


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 15_000, 250))
def test_five_thousand_hostile_networks_are_pruned_or_refused(start):
    assert faults(wrong, range(start, start + 250)) == {}


@pytest.mark.slow  # importing the compiler takes seconds
@pytest.mark.parametrize(
    "compiled", [torch.compile, lambda net: net.compile() or net], ids=["wrapped", "in place"]
)
def test_a_compiled_network_is_pruned_as_the_one_that_was_compiled(compiled):
    torch.manual_seed(0)
    plain, data = networks.mlp(), [torch.randn(60, 6)]
    expected = lobs.prune(plain, data, lobs.Sparsity(0.5), progress=False)
    found = lobs.prune(compiled(plain), data, lobs.Sparsity(0.5), progress=False)
    masks = {name.removeprefix("_orig_mod."): mask for name, mask in found.masks.items()}
    assert masks.keys() == expected.masks.keys()
    assert all(torch.equal(mask, masks[name]) for name, mask in expected.masks.items())


def test_writing_back_is_all_or_nothing(monkeypatch):
    model = networks.mlp()
    before = state(model)
    names = list(model.state_dict())

    class Stubborn(torch.Tensor):
        def copy_(self, *_):
            raise RuntimeError("read-only memory")

    real = nn.Module.state_dict

    def stubborn(self, *args, **kwargs):
        found = real(self, *args, **kwargs)
        if self is model:
            found[names[-2]] = found[names[-2]].as_subclass(Stubborn)
        return found

    monkeypatch.setattr(nn.Module, "state_dict", stubborn)
    with pytest.raises(
        LobsError, match="cannot be written in place: read-only memory Use inplace=False"
    ):
        lobs.prune(model, [torch.randn(60, 6)], lobs.Sparsity(0.5), progress=False, inplace=True)
    monkeypatch.undo()
    assert same(before, state(model))


def test_a_network_that_works_in_place_leaves_the_data_alone():
    torch.manual_seed(0)
    inner, x = networks.mlp(), torch.randn(60, 6)
    kept = x.clone()
    spoiling = lobs.prune(networks.InPlace(inner), [x], lobs.Sparsity(0.5), progress=False)
    assert torch.equal(x, kept)
    gentle = lobs.prune(inner, [2 * x + 1], lobs.Sparsity(0.5), progress=False)
    assert all(
        torch.equal(mask, spoiling.masks[f"inner.{name}"]) for name, mask in gentle.masks.items()
    )


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_inputs_too_small_or_large_for_float32_squares_still_count(size):
    x = torch.randn(200, 40) * torch.linspace(0.1, 3, 40)
    layer = nn.Linear(40, 5, bias=False)
    small = lobs.collect_moments(nn.Sequential(layer), [x * size])["0"].moment / size / size
    torch.testing.assert_close(
        small, lobs.collect_moments(nn.Sequential(layer), [x])["0"].moment, rtol=1e-4, atol=1e-4
    )
