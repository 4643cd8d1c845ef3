from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import jacrev

import lobs
from lobs import Exact, LobsError, Problem, Sparsity
from lobs.allocate import allocate
from lobs.influence import output_influence
from lobs.layers import find_layers
from tests.conftest import make_moment


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 8), nn.Tanh(), nn.Linear(8, 5)
    ).double()


def exact_influence(model, x):
    """The mean squared Jacobian with respect to every layer's output, by differentiating everything after it."""
    found, z = {}, x
    for index, step in enumerate(model):
        z = step(z)
        if isinstance(step, nn.Linear | nn.Conv2d):
            after = model[index + 1 :]
            total = 0
            for sample in z.detach():
                jacobian = jacrev(lambda s, after=after: after(s.unsqueeze(0))[0])(sample)
                squared = jacobian.square().sum(dim=0)
                total = total + (squared.sum(dim=(1, 2)) if squared.dim() == 3 else squared)
            found[str(index)] = total / len(x)
    return found


def test_influence_is_unbiased_for_the_squared_jacobian():
    model, x = network(), torch.randn(6, 2, 5, 5).double()
    expected = exact_influence(model, x)
    layers = find_layers(model)
    draws = [output_influence(model, [x], layers, seed=s) for s in range(400)]
    for layer in layers:
        values = torch.stack([d[layer.name].flatten() for d in draws])
        error = values.std(dim=0) / len(draws) ** 0.5
        assert bool(((values.mean(dim=0) - expected[layer.name]).abs() <= 5 * error + 1e-12).all())


def test_influence_of_the_last_layer_is_exactly_one():
    model, x = network(), torch.randn(6, 2, 5, 5).double()
    influence = output_influence(model, [x], find_layers(model))
    torch.testing.assert_close(influence["5"], torch.ones(1, 5).double())


def test_influence_leaves_the_model_as_it_was_even_with_frozen_weights():
    model = network().requires_grad_(False)
    model.train()
    output_influence(model, [torch.randn(3, 2, 5, 5).double()], find_layers(model))
    assert model.training and not any(m._forward_hooks for m in model.modules())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def paths():
    weights = {name: torch.randn(rows, d, dtype=torch.float64) for name, rows, d in (("a", 3, 6), ("b", 4, 5))}
    return {n: Exact().path(Problem(w, make_moment(w.shape[1]))).weighted(torch.rand(1, len(w))) for n, w in weights.items()}


def test_allocation_is_the_greedy_one_across_layers():
    runs = paths()
    for count in range(39):
        shares = allocate(runs, count)
        assert sum(shares.values()) == count
        # Nobody who stays is cheaper than somebody who goes.
        gone = [float(p.keys.flatten().sort().values[shares[n] - 1]) for n, p in runs.items() if shares[n]]
        stay = [float(p.keys.flatten().sort().values[shares[n]]) for n, p in runs.items() if shares[n] < p.keys.numel()]
        assert not gone or not stay or max(gone) <= min(stay)


def test_a_weighted_path_still_knows_its_error():
    for path in paths().values():
        for count in (0, 3, 9, path.keys.numel()):
            solution = path.cut(count)
            assert solution.removed == count
            assert float(path.curve[count]) == pytest.approx(solution.error, abs=1e-12)


def test_network_scope_removes_exactly_the_fraction_of_everything():
    model = network()
    batches = [torch.randn(40, 2, 5, 5).double() for _ in range(3)]
    for inputs in ("dense", "pruned"):
        result = lobs.prune(model, batches, Sparsity(0.7, scope="network"), inputs=inputs, progress=False)
        assert result.kept == result.total - Sparsity(0.7).count(result.total)
        assert len({round(row.kept_fraction, 2) for row in result.layers}) > 1
        assert result.certificate.measured <= result.certificate.bound


def test_network_scope_says_what_it_needs():
    batch = torch.randn(8, 2, 5, 5).double()
    target = Sparsity(0.5, scope="network")
    for settings in ({"solver": "lobs"}, {"batches": iter([batch])}):
        arguments = {"batches": [batch], "target": target, "progress": False} | settings
        with pytest.raises(LobsError, match="use solver='exact' and a list"):
            lobs.prune(network(), **arguments)
    with pytest.raises(LobsError, match="one number, not a mapping"):
        Sparsity({"a": 0.5}, scope="network")
    with pytest.raises(LobsError, match="use 'layer' or 'network'"):
        Sparsity(0.5, scope="planet")
