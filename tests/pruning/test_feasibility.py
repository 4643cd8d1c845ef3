from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lobs
from lobs import Block, Budget, NByM, Sparsity
from lobs.storage.run_store import weights_hash
from lobs.targets import removable


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("work", [lobs.prune, lobs.forecast])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            Budget(bytes=10),
            "Budget bytes is 10: what cannot be removed takes 45 bytes",
        ),  # nine biases and nine bytes of bits
        (
            Sparsity(0.5, keep_at_least={"0": 0.9}, keep_at_most={"*": 0.1}),
            "layer '0': keep_at_least 0.9 is above",
        ),
        (
            Sparsity(0.5, keep_at_least={"*": 0.9}),
            "33 weights are to be kept, but keep_at_least asks for 61",
        ),
        (
            Budget(parameters=60, keep_at_most={"*": 0.5}),
            "60 weights are to be kept, but keep_at_most allows 33",
        ),
        (Budget(parameters=100, keep_at_most={"*": 0.5}), "66 weights are to be kept"),
        (
            Block(0.5, (8, 8)),
            r"layer '0' has only 1 block\(s\) of 8×8 or what fits of it: all would go for 0.5",
        ),
        (Sparsity({0: 0.5}), "names are strings, such as '0'"),
        (Sparsity(0.5, keep_at_least={0: 0.5}), "names are strings, such as '0'"),
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
    for target in (
        Budget(bytes=49),
        Sparsity(0.99),
        Budget(parameters=100),
        Budget(parameters=33, keep_at_most={"*": 0.5}),
    ):
        lobs.prune(network(), x, target, progress=False)
    half = lobs.prune(
        network(), x, Block({"0": 0.5, "2": 0}, (4, 8)), progress=False
    )  # layer 2 is one block: it stays
    assert half.layers[1].kept == half.layers[1].total
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    assert (
        lobs.prune(depthwise, [torch.randn(9, 4, 8, 8)], Block(0.5, (2, 3)), progress=False).kept
        == 18
    )  # cut to 1×3


@pytest.mark.parametrize("kept", range(1, 100))
def test_limits_are_counted_as_they_are_written(kept):
    share, limits = kept / 100, {"*": kept / 100}
    assert removable(Sparsity(1 - share, keep_at_least=limits, keep_at_most=limits), "0", 100) == (
        100 - kept,
        100 - kept,
    )


@pytest.mark.parametrize("kind", [int, float, str, np.int64, np.float32, torch.tensor])
def test_a_budget_takes_any_kind_of_number_and_no_fraction_of_a_weight(kind):
    assert (
        lobs.prune(
            network(), [torch.randn(64, 8)], Budget(parameters=kind(30)), progress=False
        ).kept
        == 30
    )
    with pytest.raises(lobs.LobsError, match="whole number; for a fraction use keep=… or Sparsity"):
        Budget(parameters=0.1)


def test_bytes_count_a_shared_weight_once():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(
        block, block, nn.Linear(8, 3)
    )  # 88 weights and 11 biases, and 11 bytes of bits
    for size, kept in ((407, 88), (380, 81), (320, 66)):
        assert (
            lobs.prune(model, [torch.randn(64, 8)], Budget(bytes=size), progress=False).kept == kept
        )


class Stateful(nn.Sequential):
    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_no_obstacle():
    model, x = Stateful(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), [torch.randn(64, 8)]
    assert (
        lobs.prune(model, x, lobs.Sparsity(0.5), progress=False).kept == 33
        and lobs.prune(model, x, Budget(bytes=200), progress=False).kept
    )


def test_state_that_is_no_tensor_is_hashed_by_what_it_says(tmp_path):
    class Vocabulary:
        pass

    model, x = Stateful(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), [torch.randn(64, 8)]
    first, again = (
        lobs.prune(
            model,
            x,
            lobs.Sparsity(0.5),
            progress=False,
            execution=lobs.Execution(resume=tmp_path / "run_store"),
        )
        for _ in range(2)
    )
    assert torch.equal(first.model[0].weight, again.model[0].weight)
    said = {weights_hash(model)}
    for words in ({"not": "another"}, {"not": Vocabulary()}):
        model.get_extra_state = lambda words=words: words
        assert weights_hash(model) == weights_hash(model)
        said.add(weights_hash(model))
    assert len(said) == 3


def test_damping_is_a_number():
    with pytest.raises(lobs.LobsError, match="damping is 'much': it must be finite"):
        lobs.prune(
            network(),
            [torch.randn(9, 8)],
            lobs.Sparsity(0.5),
            numerics=lobs.Numerics(damping="much"),
        )


def test_a_forecast_knows_patterns_and_trials():
    x = [torch.randn(64, 512)]
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    targets = Block({"0": 0.5}, (1, 4)), Block({"0": 0.5}, (512, 4))
    rows, together = (lobs.forecast(model, x, target).seconds for target in targets)
    assert rows > 3 > together  # 512 stripes and one
    assert lobs.forecast(model, x, NByM(2, 4)).seconds > 1
    looks, once = (
        lobs.forecast(model, x, target, refit="layers").passes
        for target in (Budget(drop=0.1, evaluate=len), Sparsity(0.5, rounds=1))
    )
    assert (
        looks - once == 8 * 2
    )  # eight trials and, if none will do, one more walk two streams each; one look at influence
