from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs import Block, Budget, NByM, Sparsity


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("work", [lobs.prune, lobs.forecast])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Budget(bytes=10), "Budget bytes is 10: what cannot be removed takes 45 bytes"),  # nine biases and nine bytes of bits
        (Sparsity(0.5, keep_at_least={"0": 0.9}, keep_at_most={"*": 0.1}), "layer '0': keep_at_least 0.9 is above"),
        (Sparsity(0.5, keep_at_least={"*": 0.9}), "33 weights are to be kept, but keep_at_least asks for 61"),
        (Budget(parameters=60, keep_at_most={"*": 0.5}), "60 weights are to be kept, but keep_at_most allows 33"),
        (Budget(parameters=100, keep_at_most={"*": 0.5}), "66 weights are to be kept"),
        (Block(0.5, (4, 4)), r"a block of 4×4 is larger than layer '2' \(3×6\). Take smaller blocks, or skip the layer"),
    ],
    ids=repr,
)
def test_what_cannot_be_met_is_refused_before_a_batch_is_read(work, target, words):
    class Unread(list):
        def __iter__(self):
            raise AssertionError("read")

    with pytest.raises(lobs.LobsError, match=words):
        work(network(), Unread(), target)


def test_what_can_just_be_met_is_not_refused():
    x = [torch.randn(64, 8)]
    for target in (Budget(bytes=45), Sparsity(1.0), Budget(parameters=100), Budget(parameters=33, keep_at_most={"*": 0.5})):
        lobs.prune(network(), x, target, progress=False)
    half = lobs.prune(network(), x, Block({"0": 0.5}, (4, 4)), progress=False)  # larger than layer 2, of which nothing is asked
    assert half.layers[1].kept == half.layers[1].total


def test_damping_is_a_number():
    with pytest.raises(lobs.LobsError, match="damping is 'much': it must be finite"):
        lobs.prune(network(), [torch.randn(9, 8)], 0.5, damping="much")


def test_a_forecast_knows_patterns_and_trials():
    x = [torch.randn(64, 512)]
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    targets = Block({"0": 0.5}, (1, 4)), Block({"0": 0.5}, (512, 4))
    rows, together = (lobs.forecast(model, x, target).seconds for target in targets)
    assert rows > 3 > together  # 512 stripes and one
    assert lobs.forecast(model, x, NByM(2, 4)).seconds > 2
    looks, once = (lobs.forecast(model, x, t, passes=1).passes for t in (Budget(max_drop=0.1), Sparsity(0.5)))
    assert looks - once == 7 * 3  # every further trial looks at the units' influence once and walks two streams
