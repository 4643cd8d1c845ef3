from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lobs.errors import TargetError
from lobs.solvers.solution import (
    joined,
    mask_from_order,
    mask_of_largest,
    removal_order,
)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, float("inf")]), min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_a_mask_removes_exactly_k_with_ties(values, data):
    scores = torch.tensor(values)
    count = data.draw(st.integers(0, len(values)))
    mask = mask_from_order(removal_order(scores), count, tuple(scores.shape))
    assert int((~mask).sum()) == count
    if 0 < count < len(values):
        assert float(scores[~mask].max()) <= float(scores[mask].min())


def test_too_many_is_an_error():
    with pytest.raises(TargetError, match="cannot remove 4 of 3"):
        mask_from_order(torch.arange(3), 4, (3,))


def test_masks_of_one_parameter_join_by_what_either_removes():
    a, b = torch.tensor([True, False, True]), torch.tensor([False, True, True])
    both = joined({"x": a, "y": a}, {"x": b, "z": b})
    assert both["x"].tolist() == [False, False, True]
    assert both["y"] is a and both["z"] is b


@pytest.mark.parametrize("protected", [0, 2])
def test_a_threshold_gives_the_mask_of_the_order(protected):
    """Ties, zeros and NaN included, for every count."""
    torch.manual_seed(0)
    scores = torch.randint(0, 4, (3, 7)).float()
    odd = torch.where(torch.rand(3, 7) < 0.2, torch.nan, scores)
    for values in (scores, torch.rand(3, 7), odd):
        order = removal_order(values, protected)
        for count in range(len(order) + 1):
            expected = mask_from_order(order, count, (3, 7))
            assert torch.equal(mask_of_largest(values, count, protected), expected)
    with pytest.raises(TargetError):
        mask_of_largest(scores, len(order) + 1, protected)
