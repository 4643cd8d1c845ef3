"""Where the theorem says nothing about what a network computes, no bound is given."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4)).eval()


DATA = [torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) for _ in range(3)]


def holds_or_is_not_given(model, data, **options):
    found = lobs.prune(model, data, keep=0.6, progress=False, **options).certificate
    assert found.bound is None or found.measured is None or found.bound >= found.measured
    return found


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
@pytest.mark.filterwarnings("ignore::lobs.NumericalWarning")
def test_half_precision(kind, inputs):
    data = [x.to(kind) for x in DATA]
    for seed in range(3):
        model = nn.Linear(8, 4) if seed == 0 else network(seed)
        found = holds_or_is_not_given(model.to(kind), data, inputs=inputs)
        assert found.bound is None and "rounding the theorem does not count" in found.reason


@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
def test_a_hook_and_a_replaced_forward(inputs):
    hooked = network()
    hooked[0].register_forward_hook(lambda module, args, out: out.sin() * 9)
    assert "forward hook" in holds_or_is_not_given(hooked, DATA, inputs=inputs).reason
    replaced = network()
    replaced[2].forward = types.MethodType(
        lambda self, x: 3 * nn.Linear.forward(self, x), replaced[2]
    )
    assert "was replaced" in holds_or_is_not_given(replaced, DATA, inputs=inputs).reason


def test_a_forward_that_calls_the_original_is_refused_because_a_copy_would_run_it():
    model = network()
    plain = model[0].forward
    model[0].forward = lambda x: 2 * plain(x)
    with pytest.raises(LobsError, match=r"'0' was replaced by a function .* Write a subclass"):
        lobs.prune(model, DATA, keep=0.5, progress=False)


class Fewer:
    """Gives fewer samples at each pass, or others."""

    def __init__(self, change):
        self.passes, self.change = 0, change

    def __iter__(self):
        self.passes += 1
        for batch in DATA:
            yield self.change(batch, self.passes)


@pytest.mark.parametrize("inputs", ["dense", "pruned", "asymmetric"])
@pytest.mark.parametrize(
    "change",
    [lambda x, n: x[: max(4, 30 - n)], lambda x, n: x * (1 + n / 10), lambda x, n: x.roll(n, 1)],
)
def test_data_that_changes_from_pass_to_pass(inputs, change):
    found = holds_or_is_not_given(network(), Fewer(change), inputs=inputs, refit="layers")
    assert found.bound is None and "when they were read again" in found.reason


def test_certify_checks_the_same():
    model = network()
    pruned = lobs.prune(model, DATA, keep=0.5, progress=False).model
    assert lobs.certify(model, pruned, DATA).bound is not None
    assert lobs.certify(model, pruned, Fewer(lambda x, n: x * n)).bound is None
    pruned[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert "forward hook" in lobs.certify(model, pruned, DATA).reason


def test_rounding_of_single_precision_is_counted():
    for seed in range(20):
        model = network(seed)
        pruned = network(seed)
        with torch.no_grad():
            pruned[0].weight[0, 0] *= 1 + 1e-6
        found = lobs.certify(model, pruned, DATA)
        assert found.bound >= found.measured
