from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lobs.errors import TargetError
from lobs.solvers.solution import joined, mask_from_order, removal_order


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
