"""Mutated files: an error or the same weights, never a crash, a hang or other weights."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch

import lobs
from lobs import LobsError


def original(path):
    torch.manual_seed(1)
    state, masks = {}, {}
    for name, shape, keep in (
        ("a.weight", (60, 100), 0.05),
        ("b.weight", (8, 4, 3, 3), 0.5),
        ("c.weight", (5, 8), 1.0),
    ):
        masks[name] = torch.rand(shape) < keep
        state[name] = torch.randn(shape).masked_fill(~masks[name], 0)
        state[name.replace("weight", "bias")] = torch.randn(shape[0])
    state["steps"] = torch.tensor(7)
    lobs.storage.save_compact(
        state,
        path,
        masks,
        {"kept": 1, "layers": []},
        values=random.choice(["same", "float16", "int8"]),
    )
    return path.read_bytes()


def flip(data, rng):
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(data, rng):
    start = rng.randrange(len(data))
    run = bytes(rng.choice([0, 255, rng.randrange(256)]) for _ in range(rng.randrange(1, 40)))
    return data[:start] + run + data[start + len(run) :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def grow(data, rng):
    place = rng.choice([len(data), rng.randrange(len(data))])
    return data[:place] + rng.randbytes(rng.randrange(1, 60)) + data[place:]


def swap(data, rng):
    a, b = sorted(rng.sample(range(len(data)), 2))
    n = rng.randrange(1, 50)
    return data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]


def header_number(data, rng):
    """Another number in the header's JSON, its length kept right."""
    n = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + n].decode()
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    for _ in range(rng.choice([1, 2, 5])):
        i = rng.choice(digits)
        text = text[:i] + rng.choice("0123456789") + text[i + 1 :]
    return data[:8] + text.encode() + data[8 + n :]


def header_value(data, rng):
    """A field of the header replaced by something else, and the header rewritten."""
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    place = rng.choice(list(header))
    inner = header[place]
    key = rng.choice(list(inner))
    inner[key] = rng.choice(
        ["", "x", 0, -1, 2**63, 2**64, [], {}, None, True, 1e308, [0, 2**62], "[" * 5000, "\ud800"]
    )
    if rng.random() < 0.2:
        del inner[key]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + n :]


def length_field(data, rng):
    return (
        struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, rng.randrange(2 * len(data))]))
        + data[8:]
    )


MUTATIONS = (flip, flip, overwrite, cut, grow, swap, header_number, header_value, length_field)


def same(one, other):
    return (
        one.record == other.record
        and list(one.state_dict) == list(other.state_dict)
        and all(
            torch.equal(t, other.state_dict[n]) and t.dtype == other.state_dict[n].dtype
            for n, t in one.state_dict.items()
        )
        and one.masks.keys() == other.masks.keys()
        and all(torch.equal(m, other.masks[n]) for n, m in one.masks.items())
    )


def fuzz(path, count, seed):
    rng = random.Random(seed)
    random.seed(seed)
    data = original(path)
    truth = lobs.load(path)
    refused = 0
    for i in range(count):
        mutated = rng.choice(MUTATIONS)(data, rng)
        path.write_bytes(mutated)
        try:
            loaded = lobs.load(path)
        except LobsError:
            refused += 1
            continue
        assert same(loaded, truth), f"mutation {i} of seed {seed} changed the content"
    return refused


@pytest.mark.parametrize("seed", range(3))
def test_a_few_hundred_mutated_files(tmp_path, seed):
    assert fuzz(tmp_path / "x", 150, seed) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_six_thousand_mutated_files(tmp_path, seed):
    assert fuzz(tmp_path / "x", 500, seed) > 400
