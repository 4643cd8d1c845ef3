"""Batches as people have them, noise in forward passes, and networks left as they were."""

from __future__ import annotations

import copy
from collections import UserDict

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.forward import call, evaluating, fitted
from lobs.errors import NumericalWarning
from lobs.layers.untouched import copied
from tests.architectures import plain


def pruned(name, number=6, **options):
    model, batch = plain.NETWORKS[name]()
    torch.manual_seed(1)
    batches = [batch(32) for _ in range(number)]
    return model, batches, lobs.prune(model, batches, keep=0.5, progress=False, **options)


@pytest.mark.parametrize(
    "name", ["two-inputs", "labelled", "dict-with-labels", "from-dict", "list-of-images"]
)
@pytest.mark.filterwarnings("ignore::lobs.errors.NumericalWarning")
def test_batches_are_taken_as_people_have_them(name):
    _, batches, result = pruned(name)
    assert result.kept == result.total - (result.total + 1) // 2
    assert result.settings["samples"] == 32 * len(batches)


def test_unknown_keys_are_dropped_with_a_note_and_wrappers_of_mappings_serve():
    with pytest.warns(NumericalWarning, match="hold labels, but TwoInputs.forward takes left, rig"):
        model, batches, result = pruned("dict-with-labels")
    pairs = [(b["left"], b["right"]) for b in batches]
    wrapped = [UserDict({"left": a, "right": b}) for a, b in pairs]
    for same in (pairs, wrapped):
        again = lobs.prune(model, same, keep=0.5, progress=False)
        assert torch.equal(again.model.out.weight, result.model.out.weight)


def test_a_wrong_batch_is_answered_with_the_line_to_write():
    model = plain.TwoInputs()
    for batch in (torch.randn(4, 8), (torch.randn(4, 8),), {"left": torch.randn(4, 8)}):
        with pytest.raises(lobs.LobsError, match=r"write batches as \{'left': …, 'right': …\}"):
            lobs.prune(model, [batch], keep=0.5, progress=False)


@pytest.mark.parametrize("name", ["noise", "variational", "dropout-on"])
def test_noise_is_drawn_alike_in_both_streams(name):
    model, batches, result = pruned(name, 10)
    found = result.certificate
    assert found.relative(found.measured) < 0.35  # 0.9 where each stream draws its own
    with evaluating(model):
        first, second = (call(model, batches[0]) for _ in range(2))
    first, second = (x[0] if isinstance(x, tuple) else x for x in (first, second))
    assert torch.equal(first, second)


def test_the_callers_random_state_stays():
    model, _ = plain.NETWORKS["noise"]()
    torch.manual_seed(3)
    wanted = torch.randn(5)
    torch.manual_seed(3)
    with evaluating(model):
        call(model, torch.randn(4, 20, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.randn(5), wanted)


@pytest.mark.filterwarnings("ignore::lobs.errors.NumericalWarning")
def test_no_trace_is_left_in_caches_or_buffers():
    class Counting(plain.Cached):
        def __init__(self):
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x):
            self.passes += 1
            self.last = x
            return super().forward(x)

    model, batches = nn.Sequential(Counting(), Counting()).eval(), list(torch.randn(6, 32, 6, 12))
    result = lobs.prune(model, batches, keep=0.5, progress=False)
    for network in (model, result.model):
        assert all(not part.places and not hasattr(part, "last") for part in network)
        copy.deepcopy(network)
    assert float(model[0].passes) == 0


@pytest.mark.filterwarnings("ignore::lobs.errors.NumericalWarning")
def test_a_network_whose_caches_have_a_history_already_is_pruned():
    model, batch = plain.NETWORKS["cached"]()
    model(batch(3))  # with gradients
    assert model[0].places["cpu"].requires_grad
    result = lobs.prune(model, [batch(32) for _ in range(6)], keep=0.5, progress=False)
    assert result.kept_fraction == pytest.approx(0.5, abs=1e-3)
    twin = copied(model)
    assert torch.equal(twin[0].places["cpu"], model[0].places["cpu"])


def test_networks_that_overwrite_what_a_gradient_needs_are_pruned():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.first(x)
            gate = x.sigmoid()
            y = gate * x
            gate.mul_(0.5)  # the product needs the old value
            return self.second(y + gate)

    result = lobs.prune(Overwriting(), list(torch.randn(4, 40, 8)), keep=0.5, progress=False)
    assert result.kept == 48


def test_a_list_for_one_argument_is_read_as_one_batch():
    model, batch = plain.NETWORKS["list-of-images"]()
    (read,) = fitted(model, [batch(5)])
    assert [*read] == ["images"] and len(read["images"]) == 5
