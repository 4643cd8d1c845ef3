from __future__ import annotations

import pytest
import torch

import lobs
from lobs import Block, ErrorBudget, NByM, Sparsity, Structured
from lobs.errors import TargetError
from lobs.targets import check_names, for_layer, wanted


def test_count_is_the_nearest_whole_number():
    assert [Sparsity(f).count(10) for f in (0, 0.04, 0.05, 0.5, 1)] == [0, 0, 1, 5, 10]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), {"a": 2.0}])
def test_impossible_fractions_are_refused(fraction):
    with pytest.raises(TargetError, match="between 0 and 1"):
        Sparsity(fraction)


@pytest.mark.parametrize("epsilon", [-1.0, float("inf"), float("nan")])
def test_impossible_epsilons_are_refused(epsilon):
    with pytest.raises(TargetError, match="finite and not negative"):
        ErrorBudget(epsilon)


def test_exact_name_beats_glob_and_first_glob_wins():
    target = Sparsity({"fc*": 0.5, "f*": 0.1, "fc3": 0.9})
    assert for_layer(target, "fc3") == Sparsity(0.9, scope="layer")
    assert for_layer(target, "fc1") == Sparsity(0.5, scope="layer")
    assert for_layer(target, "conv") is None


def test_a_key_that_matches_no_layer_is_a_typing_error():
    with pytest.raises(
        TargetError, match=r"'fc9', which matches no prunable layer. There are: fc1, fc2"
    ):
        check_names(Sparsity({"fc9": 0.5}), ["fc1", "fc2"])


def test_a_kept_fraction_is_a_sparsity_and_nothing_else_is_taken():
    assert wanted(None, 0.5) == Sparsity(0.5)
    for wrong in ("0.5", True):
        with pytest.raises(TargetError, match="use Sparsity"):
            wanted(wrong, None)


def test_relative_budget_scales_with_the_output():
    assert ErrorBudget(0.1, relative=True).limit(100.0) == pytest.approx(1.0)
    assert ErrorBudget(0.1).limit(100.0) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: NByM(5, 4),
        lambda: NByM(-1, 4),
        lambda: NByM(1, 0),
        lambda: NByM({"fc": 9}, 8),
        lambda: NByM(2, 4, along="rows"),
        lambda: Block(1.2),
        lambda: Block(0.5, (1, 0)),
        lambda: Block(0.5, (4,)),
        lambda: Structured(-0.1),
        lambda: Structured(0.5, "rows"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(wrong):
    with pytest.raises(TargetError):
        wrong()


def test_patterns_are_looked_up_by_name_or_glob():
    assert for_layer(NByM({"fc1": 2, "fc*": 1}, 4), "fc2") == NByM(1, 4)
    assert for_layer(NByM({"fc1": 2}, 4), "conv") is None
    assert for_layer(Block({"fc*": 0.5}, (4, 4)), "fc2") == Block(0.5, (4, 4))
    assert for_layer(Structured({"fc*": 0.5}, "inputs"), "fc2") == Structured(0.5, "inputs")
    with pytest.raises(TargetError, match="matches no prunable layer"):
        check_names(NByM({"nope": 2}, 4), ["fc1"])


def test_a_single_number_leaves_the_networks_own_ends_whole():
    order = ["a", "b", "c"]
    assert Structured(0.5).inside(order).fraction == {"a": 0.5, "b": 0.5}
    assert Structured(0.5, "inputs").inside(order).fraction == {"b": 0.5, "c": 0.5}
    named = Structured({"c": 0.5})
    assert named.inside(order) is named
    with pytest.raises(TargetError, match="there is only layer 'a'"):
        Structured(0.5).inside(["a"])


def test_a_short_last_group_keeps_its_share_rounded_up():
    assert [NByM(2, 4).quota(r) for r in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert [NByM(1, 4).quota(r) for r in (1, 2, 3, 4)] == [0, 1, 2, 3]


def test_a_layer_is_solved_by_what_it_keeps():
    problem = lobs.Problem(torch.tensor([[3.0, 1.0, 2.0, 4.0]]), torch.eye(4))
    assert lobs.solve(problem, "magnitude", keep="50%").kept == 2
    with pytest.raises(TargetError, match=r"target is 0\.5: say keep=0\.5"):
        lobs.solve(problem, "magnitude", 0.5)
