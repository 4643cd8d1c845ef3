from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lobs.storage.compact.codes import gap_width, pack_bits, pack_gaps, unpack_bits, unpack_gaps


@st.composite
def supports(draw):
    size = draw(st.integers(0, 3000))
    keep = draw(st.floats(0, 1))
    return np.flatnonzero(np.random.default_rng(draw(st.integers(0, 99))).random(size) < keep), size


def naive_gap_bytes(positions, width):
    low, unary, last = "", "", -1
    for p in positions:
        gap, last = int(p) - last - 1, int(p)
        low += "".join(str(gap >> b & 1) for b in range(width))
        unary += "0" * (gap >> width) + "1"
    streams = [s + "0" * (-len(s) % 8) for s in (low, unary)]
    return bytes(int(s[i : i + 8], 2) for s in streams for i in range(0, len(s), 8))


@given(supports(), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_gaps_are_what_a_loop_over_bits_writes_and_come_back(support, width):
    positions, size = support
    data = pack_gaps(positions, width)
    assert data.tobytes() == naive_gap_bytes(positions, width)
    assert np.array_equal(unpack_gaps(data, len(positions), width, size), positions)


@given(supports())
@settings(max_examples=60, deadline=None)
def test_the_announced_cost_is_the_length_and_the_least_there_is(support):
    positions, _ = support
    width, cost = gap_width(positions)
    assert cost == len(pack_gaps(positions, width))
    assert all(cost <= len(pack_gaps(positions, k)) for k in range(16))


@given(supports())
@settings(max_examples=60, deadline=None)
def test_bits_come_back(support):
    positions, size = support
    assert np.array_equal(unpack_bits(pack_bits(positions, size), size), positions)


def test_gaps_at_random_are_within_five_percent_of_the_entropy():
    for p in (0.02, 0.05, 0.07):
        positions = np.flatnonzero(np.random.default_rng(0).random(200_000) < p)
        entropy = -200_000 * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
        assert gap_width(positions)[1] < 1.05 * entropy


@pytest.mark.parametrize(
    ("data", "count", "width", "size"),
    [
        ([0b10000000], 2, 0, 8),  # too few gaps
        ([0b11000000], 1, 0, 8),  # too many
        ([0b00000001], 1, 0, 7),  # beyond the end
        ([0b10000000, 0], 1, 0, 8),  # a byte too many
        ([255, 0b10000000], 1, 8, 100),  # low bits beyond the end
        ([], 1, 0, 8),
        ([], 0, 41, 8),
        ([0b00000001] * 4, 4, 40, 2**40),  # gaps of 2^43
    ],
)
def test_gaps_that_contradict_their_entry_are_refused(data, count, width, size):
    with pytest.raises(ValueError, match=r"gap|bytes"):
        unpack_gaps(np.array(data, np.uint8), count, width, size)


def test_bits_that_contradict_their_size_are_refused():
    with pytest.raises(ValueError, match="beyond"):
        unpack_bits(np.array([1], np.uint8), 7)
    with pytest.raises(ValueError, match="2 bytes"):
        unpack_bits(np.array([1, 1], np.uint8), 7)
