from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.blocks import Repeated, in_blocks, layers_of
from lobs.calibration.blocks.repeated import repeated_blocks
from lobs.calibration.blocks.rerun import Rerun
from lobs.calibration.forward import evaluating
from lobs.calibration.layer_problem import (
    _TETHERS,
    _serving,
    asymmetric_problem,
    kept_share,
)
from lobs.calibration.moments import Moments
from lobs.layers import find_layers
from lobs.solvers import linalg
from lobs.solvers.problem import Problem


class Part(nn.Module):
    """One residual block that counts its calls."""

    calls = 0

    def __init__(self, width=6, bias=None):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, scale=None, past_key_values=None, **_):
        Part.calls += 1
        if past_key_values is not None:
            past_key_values.append(x)
            x = x + 0.1 * len(past_key_values)
        out = x + self.down(torch.relu(self.up(self.norm(x)))) * (1.0 if scale is None else scale)
        return (out, None)


class Decoder(nn.Module):
    """Blocks in a list, called with a shared argument; no tracer can follow it."""

    def __init__(self, depth=4):
        super().__init__()
        self.start = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Part() for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        scale = torch.full((1, 6), 0.5) if float(x.sum()) > -1e30 else None
        h = self.start(x)
        for block in self.blocks:
            h = block(h, scale=scale)[0]
        return self.head(h)


class Own(Decoder):
    """Every block has an argument of its own."""

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for i, block in enumerate(self.blocks):
            h = block(h, scale=torch.full((1, 6), 0.1 * i))[0]
        return self.head(h)


class Depends(Decoder):
    """A block's argument depends on the activations before it."""

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for block in self.blocks:
            h = block(h, scale=h.mean(0, keepdim=True))[0]
        return self.head(h)


class Skips(Decoder):
    """Every block sees what the block before the last gave."""

    def forward(self, x):
        before = h = self.start(x) if float(x.sum()) > -1e30 else x
        for block in self.blocks:
            before, h = h, block(h + before)[0]
        return self.head(h)


class TwoRows(Decoder):
    """A second row gets the first row's output, and its blocks an argument of their own."""

    def __init__(self):
        super().__init__(3)
        self.other, self.more = nn.Linear(5, 6), nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        first = self.start(x) if float(x.sum()) > -1e30 else x
        for i, block in enumerate(self.blocks):
            first = block(first, scale=None if i else torch.full((1, 6), 0.5))[0]
        h = self.other(x)
        for i, block in enumerate(self.more):
            h = block(h, scale=first.mean(0, keepdim=True) + 0.1 * i)[0]
        return self.head(h)


class Caches(Decoder):
    """Blocks add to a cache that the network makes for each call."""

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for block in self.blocks:
            h = block(h, past_key_values=[])[0]
        return self.head(h)


class Cache:
    """Looks like transformers' caches."""

    def __init__(self):
        self.seen = []

    def update(self, x):
        self.seen.append(x)
        return self.seen[0]

    def get_seq_length(self):
        return len(self.seen)


class Remembers(Part):
    """A block that takes the cache by position, as GPT-2's do, and uses its oldest entry."""

    def forward(self, x, cache=None):
        return x + self.down(torch.relu(self.up(x if cache is None else cache.update(x))))


class CachesByPosition(Decoder):
    """Every block gets a cache by position."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(4))

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for block in self.blocks:
            h = block(h, Cache())
        return self.head(h)


class InPlace(Part):
    """A block that changes a tensor once a layer has read it, and reads it again."""

    def __init__(self):
        super().__init__()
        self.short = nn.Linear(6, 6)

    def forward(self, x):
        y = self.norm(x)
        short = self.short(y)
        return short + self.down(torch.relu(self.up(y.clamp_(min=0))))


class WorksInPlace(Decoder):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(4))

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Attends(Part):
    """Three layers read one tensor; the narrow ones sum W D, the wide one sums D."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.o = nn.Linear(10, 6)

    def forward(self, x):
        y = self.norm(x)
        return x + self.o(torch.cat([self.q(y), self.k(y), self.v(y)], dim=-1))


class Attention(WorksInPlace):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attends() for _ in range(4))


class Twice(Decoder):
    """One block runs several times."""

    def __init__(self):
        super().__init__(2)

    def forward(self, x):
        h = self.start(x) if float(x.sum()) > -1e30 else x
        for _ in range(3):
            h = self.blocks[0](h)[0]
        return self.head(self.blocks[1](h)[0])


def batches(number=3):
    return [torch.randn(16, 5, generator=torch.Generator().manual_seed(s)) for s in range(number)]


def pairs(dense, pruned):
    return list(zip(find_layers(dense), find_layers(pruned), strict=True))


def walked(dense, made):
    """Return all moments; every layer is spoilt as soon as it has been seen."""
    pruned, found = copy.deepcopy(dense), {}
    with evaluating(dense), evaluating(pruned):
        for block in made(dense, pruned, batches(), pairs(dense, pruned)):
            for layer, moments in layers_of(block):
                found[layer.name] = moments.pruned.moment, moments.residual(layer.matrix())
                layer.write(layer.matrix() * 0.9)
            block.advance()
    return found


def rerun(*given):
    return [Rerun(*given)]


@pytest.mark.parametrize("kind", [Decoder, Own, TwoRows, CachesByPosition, WorksInPlace, Attention])
def test_repeated_blocks_give_the_bits_of_running_the_network(kind):
    torch.manual_seed(0)
    dense = kind()
    ours, slow = walked(dense, repeated_blocks), walked(dense, rerun)
    assert list(ours) == list(slow)
    for name in ours:
        assert all(torch.equal(a, b) for a, b in zip(ours[name], slow[name], strict=True))


@pytest.mark.parametrize("kind", [Depends, Skips, Twice, Caches])
def test_a_network_without_rows_of_blocks_is_run_from_its_start(kind):
    torch.manual_seed(0)
    dense = kind()
    with evaluating(dense):
        assert not repeated_blocks(dense, dense, batches(), pairs(dense, dense))
    pruned = copy.deepcopy(dense)
    (block,) = in_blocks(dense, pruned, batches(), pairs(dense, pruned), repeated=True)
    assert isinstance(block, Rerun)


def test_cost_is_linear_in_depth():
    calls = []
    for depth in (4, 8, 16):
        dense, Part.calls = Decoder(depth), 0
        walked(dense, repeated_blocks)
        calls.append(Part.calls / depth)
    assert max(calls) < 1.05 * min(calls)


def test_layers_with_one_input_share_its_moment():
    dense = Attention()
    pruned = copy.deepcopy(dense)
    seen = {}
    for block in in_blocks(dense, pruned, batches(), pairs(dense, pruned), repeated=True):
        for layer, moments in layers_of(block):
            seen[layer.name] = moments
    q, k, v, o = (seen[f"blocks.1.{name}"].pruned for name in "qkvo")
    assert q is k is v and q is not o
    assert q.count == o.count == 42


def test_held_out_samples_stay_out_of_the_moments():
    dense = Decoder()
    pruned = copy.deepcopy(dense)
    counts = set()
    for block in in_blocks(dense, pruned, batches(), pairs(dense, pruned), repeated=True):
        for _, moments in layers_of(block):
            if isinstance(block, Repeated):
                counts.add((moments.pruned.count, moments.held_out.pruned.count))
    assert counts == {(42, 6)}


def _plain():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("kind", [Depends, _plain])  # reruns and traced steps
@pytest.mark.parametrize("number", [3, 9])
def test_reruns_and_steps_hold_the_same_samples_out_of_every_layer(kind, number):
    torch.manual_seed(0)
    dense, data = kind(), batches(number)
    pruned = copy.deepcopy(dense)
    walk = in_blocks(dense, pruned, data, pairs(dense, pruned), repeated=True)
    first, moments = next(layers_of(next(walk)))
    seen = torch.cat(data)
    held = torch.zeros(number, 16, dtype=torch.bool)
    if number < 8:
        held[:, 14:] = True  # the last eighth of every batch
    else:
        held[7::8] = True
    fit, kept = (Moments.of(first, seen.device) for _ in range(2))
    fit.add(seen[~held.flatten()].unsqueeze(0))
    kept.add(seen[held.flatten()].unsqueeze(0))
    torch.testing.assert_close(moments.pruned.moment, fit.moment)
    torch.testing.assert_close(moments.held_out.pruned.moment, kept.moment)
    assert (moments.pruned.count, moments.held_out.pruned.count) == (fit.count, kept.count)


def test_of_many_batches_one_in_eight_is_held_out():
    dense = Decoder()
    pruned = copy.deepcopy(dense)
    for block in in_blocks(dense, pruned, batches(16), pairs(dense, pruned), repeated=True):
        if isinstance(block, Repeated):
            assert [s.held_out for s in block.samples()] == ([False] * 7 + [True]) * 2


def _paired(samples, d=20, rows=6, noise=1.0, seed=0):
    """Return Ĥ and W D of inputs that differ by a fixed map and noise."""
    fixed = torch.Generator().manual_seed(9)
    w = torch.randn(rows, d, generator=fixed, dtype=torch.float64)
    shift = 0.3 * torch.randn(d, d, generator=fixed, dtype=torch.float64) / d**0.5
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, d, generator=own, dtype=torch.float64)
    far = x @ shift + noise * torch.randn(samples, d, generator=own, dtype=torch.float64)
    return x.mT @ x / samples, w @ (far.mT @ x) / samples


def _gain(shift, moment, residual):
    return float(2 * (shift * residual).sum() - ((shift @ moment) * shift).sum())


@pytest.mark.parametrize(("samples", "noise"), [(24, 3.0), (100, 1.0), (5000, 0.1)])
def test_the_chosen_aim_is_never_worse_on_held_out_samples_than_either_end(samples, noise):
    fit, held = _paired(samples, noise=noise), _paired(samples, noise=noise, seed=1)
    ladder = [1e-3 * step for step in _TETHERS]
    chosen = _serving(*fit, ladder, *held)
    ends = [linalg.ridge_solve(*fit, lam) for lam in ladder]
    assert _gain(chosen, *held) >= max(0.0, *(_gain(shift, *held) for shift in ends)) - 1e-9


def test_more_data_moves_the_aim_to_the_whole_shift():
    shares = []
    for samples in (24, 200, 20_000):
        fit, held = _paired(samples), _paired(samples, seed=1)
        chosen = _serving(*fit, [1e-3], *held)
        whole = linalg.ridge_solve(*fit, 1e-3)
        shares.append(float(chosen.norm() / whole.norm()))
    assert shares[0] < shares[1] < shares[2] and shares[2] > 0.9


def _layer_problem(samples, given=None, alike=5, d=24, rows=40):
    """Return a problem with an aim of its own, and Ĥ of held-out samples."""
    made = torch.Generator().manual_seed(3)
    mix = torch.eye(d) + torch.randn(d, d, generator=made) / d**0.5
    weight = torch.randn(rows, d, generator=made)

    def seen(number, seed):
        # Tokens of one text resemble each other: fewer samples say as much.
        x = torch.randn(number // alike, d, generator=torch.Generator().manual_seed(seed)) @ mix
        return (x.mT @ x / len(x)).double()

    fit, held = seen(samples, 0), seen(20_000, 1)
    nothing = torch.zeros(1, rows, d, dtype=torch.float64)  # both networks have the same inputs
    problem = Problem(weight, fit, samples=samples, damping=given)
    return asymmetric_problem(problem, nothing, (held.unsqueeze(0), nothing), 0.5), held


def test_held_out_samples_choose_a_damping_that_serves_on_new_data():
    chosen, held = _layer_problem(120)
    plain = replace(chosen, least_damping=0.0)
    assert chosen.least_damping > 0 and chosen.metrics[0].damping == chosen.least_damping
    errors = []
    for problem in (chosen, plain):
        change = (
            lobs.solve(problem, "auto", lobs.Sparsity(0.5, scope="layer")).weight - problem.weight
        ).double()
        errors.append(float(((change @ held) * change).sum()))
    assert errors[0] < errors[1]


def test_with_enough_data_or_a_damping_of_the_user_none_is_chosen():
    for samples, alike in ((300_000, 5), (300, 5), (200, 1), (1000, 1)):
        assert _layer_problem(samples, alike=alike)[0].least_damping == 0
    given = _layer_problem(120, given=1e-6)[0]
    assert given.damping == 1e-6 and given.least_damping == 0


@pytest.mark.parametrize(
    ("target", "share"),
    [
        (lobs.Sparsity(0.7, scope="layer"), 0.3),
        (lobs.NByM(1, 4), 0.25),
        (lobs.ErrorBudget(0.1), 0.5),
        (None, 0.5),
    ],
)
def test_the_share_that_a_target_keeps_is_known_or_a_half(target, share):
    problem = Problem(torch.randn(10, 20), torch.eye(20))
    assert kept_share(target, problem) == pytest.approx(share)


class Sometimes(nn.Module):
    """A layer that only some batches reach, between two that all batches reach."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        if float(x[0, 0]) > 0:
            h = h + self.rare(h)
        return self.last(h)


@pytest.mark.parametrize("inputs", ["asymmetric", "pruned", "dense"])
@pytest.mark.parametrize("reached", [[1], [2, 3]])
def test_a_layer_that_not_every_batch_reaches_is_pruned(inputs, reached):
    torch.manual_seed(0)
    batches = [torch.randn(20, 6) for _ in range(4)]
    for index, batch in enumerate(batches):
        batch[0, 0] = 1.0 if index in reached else -1.0
    result = lobs.prune(Sometimes(), batches, keep=0.5, inputs=inputs, progress=False)
    assert [layer.name for layer in result.layers] == ["first", "rare", "last"]
    assert result.kept == 45 and int((result.model.rare.weight == 0).sum()) > 0
