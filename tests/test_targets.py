from __future__ import annotations

import pytest

from lobs import ErrorBudget, Sparsity
from lobs.errors import TargetError
from lobs.targets import as_target, check_names, for_layer


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
    with pytest.raises(TargetError, match=r"'fc9', which matches no prunable layer. There are: fc1, fc2"):
        check_names(Sparsity({"fc9": 0.5}), ["fc1", "fc2"])


def test_a_number_is_a_sparsity():
    assert as_target(0.5) == Sparsity(0.5)
    for wrong in ("0.5", True, None):
        with pytest.raises(TargetError, match="use Sparsity"):
            as_target(wrong)


def test_relative_budget_scales_with_the_output():
    assert ErrorBudget(0.1, relative=True).limit(100.0) == pytest.approx(1.0)
    assert ErrorBudget(0.1).limit(100.0) == pytest.approx(0.01)
