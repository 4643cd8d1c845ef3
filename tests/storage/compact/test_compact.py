from __future__ import annotations

import json
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import lobs
from lobs import LobsError, zoo
from lobs.storage.compact.file import digest_of
from lobs.storage.compact.tensors import DTYPES


def random_masked(*shape, keep=0.1, dtype=torch.float32):
    mask = torch.rand(shape) < keep
    return torch.randn(shape).to(dtype).masked_fill(~mask, 0), mask


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_round_trip(path, state, masks, record):
    lobs.storage.save_compact(state, path, masks, record)
    loaded = lobs.load(path)
    assert list(loaded.state_dict) == list(state) and loaded.record == record
    assert all(same_bits(loaded.state_dict[n], t) for n, t in state.items())
    assert loaded.masks.keys() == masks.keys() and all(
        torch.equal(loaded.masks[n], m) for n, m in masks.items()
    )


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.03, 0.07, 0.3, 0.6, 0.97, 1.0])
def test_round_trip_is_bit_equal_at_any_sparsity(tmp_path, keep):
    w, mask = random_masked(30, 40, 3, 3, keep=keep)
    assert_round_trip(
        tmp_path / "x", {"w": w, "b": torch.randn(30)}, {"w": mask}, {"kept": int(mask.sum())}
    )


def test_odd_values_are_kept_bit_by_bit(tmp_path):
    w, mask = random_masked(20, 50)
    place = iter(mask.nonzero().tolist())
    for odd in (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45):
        w[tuple(next(place))] = odd
    gone = (~mask).nonzero()[0].tolist()
    w[tuple(gone)] = -0.0  # a negative zero outside the mask: the mask needs a part of its own
    assert_round_trip(tmp_path / "x", {"w": w}, {"w": mask}, {})


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path, name):
    raw = (
        (torch.rand(600) < 0.1).to(torch.uint8)
        if name == "bool"
        else torch.randint(256, (600 * DTYPES[name].itemsize,))
    )
    raw = raw.to(torch.uint8).view(-1, DTYPES[name].itemsize)
    raw[torch.rand(600) < 0.9] = 0
    w = raw.reshape(-1).view(DTYPES[name]).reshape(20, 30)
    empty = torch.zeros(0, 3, dtype=DTYPES[name])
    scalar = (
        torch.ones((), dtype=torch.uint8).to(DTYPES[name])
        if w.dtype != torch.bool
        else torch.tensor(True)
    )
    assert_round_trip(tmp_path / "x", {"w": w, "empty": empty, "scalar": scalar}, {}, {})


@given(st.integers(0, 10**6), st.floats(0, 1), st.lists(st.integers(0, 9), max_size=4))
@settings(max_examples=40, deadline=None)
def test_round_trip_of_anything(tmp_path_factory, seed, keep, shape):
    torch.manual_seed(seed)
    w, mask = random_masked(*shape, keep=keep)
    w.masked_fill_(torch.rand(shape) < 0.1, 0.0)
    assert_round_trip(
        tmp_path_factory.mktemp("c") / "x", {"w": w, "v": w + 1}, {"w": mask}, {"é": [1, None, "x"]}
    )


def test_bytes_add_up_to_the_file(tmp_path):
    w, mask = random_masked(100, 200)
    done = lobs.storage.save_compact({"w": w, "b": torch.randn(100)}, tmp_path / "x", {"w": mask})
    assert done.file_bytes == done.path.stat().st_size
    stored = load_file(done.path)
    assert sum(t.stored_bytes for t in done.tensors) == sum(
        t.numel() * t.element_size() for t in stored.values()
    )
    row = done.tensors[0]
    assert (
        row.kept == int(mask.sum()) and row.value_bytes < 4 * row.kept and row.dense_bytes == 80_000
    )
    assert done.dense_bytes == 80_400


def test_each_tensor_takes_the_cheapest_code(tmp_path):
    state, masks = {}, {}
    for name, keep in (("gaps", 0.03), ("bits", 0.5), ("dense", 1.0)):
        state[name], masks[name] = random_masked(100, 100, keep=keep)
    codes = {
        t.name: t.code for t in lobs.storage.save_compact(state, tmp_path / "x", masks).tensors
    }
    assert codes == {"gaps": "gaps", "bits": "bits", "dense": "dense"}


@pytest.mark.parametrize("keep", [0.03, 0.5, 0.9, 0.96, 0.97, 0.99, 0.9999, 1.0])
@pytest.mark.parametrize("shape", [(5, 7), (100, 200)])
def test_a_tensor_takes_no_more_than_its_kept_values_and_a_bit_for_each_place(
    tmp_path, keep, shape
):
    w, mask = random_masked(*shape, keep=keep)
    (row,) = lobs.storage.save_compact({"w": w}, tmp_path / "x", {"w": mask}).tensors
    assert row.stored_bytes <= 4 * row.kept + -(-row.total // 8)


def test_lenet_300_at_seven_percent_takes_at_most_eleven_percent(tmp_path):
    model = zoo.trained("lenet300")
    masks = {}
    for name, keep in (("fc1", 0.051), ("fc2", 0.2), ("fc3", 0.65)):
        weight = model.get_parameter(f"{name}.weight")
        order = weight.abs().flatten().argsort(descending=True)[: round(keep * weight.numel())]
        masks[f"{name}.weight"] = (
            torch.zeros(weight.numel(), dtype=torch.bool)
            .index_fill_(0, order, True)
            .view(weight.shape)
        )
    lobs.training.apply_masks(model, masks)
    done = lobs.storage.save_compact(model, tmp_path / "x", masks)
    dense = lobs.save(model, tmp_path / "dense").stat().st_size
    assert done.file_bytes <= 0.11 * dense
    assert all(
        same_bits(lobs.load(done.path).state_dict[n], t) for n, t in model.state_dict().items()
    )


@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("keep", [0.05, 0.4, 1.0])
def test_quantised_values_stay_within_the_stated_error(tmp_path, kind, keep):
    w, mask = random_masked(30, 64, keep=keep)
    w[0] *= 1e-3
    done = lobs.storage.save_compact(
        {"w": w, "b": torch.randn(30)}, tmp_path / "x", {"w": mask}, values=kind
    )
    loaded = lobs.load(done.path)
    moved = (loaded.state_dict["w"] - w).abs()
    assert float(moved.max()) == pytest.approx(done.tensors[0].largest_error)
    limit = (
        w.abs() * 2.0**-11
        if kind == "float16"
        else (w.abs().amax(1, keepdim=True) / 254 * 1.001).expand_as(w)
    )
    assert bool((moved <= limit + 2.0**-25).all()) and done.tensors[1].largest_error == 0
    assert torch.equal(loaded.masks["w"], mask) and not (loaded.state_dict["w"][~mask] != 0).any()
    assert done.tensors[0].value_bytes == int(mask.sum()) * (2 if kind == "float16" else 1) + (
        120 if kind == "int8" else 0
    )


def test_values_that_cannot_be_rounded_are_refused(tmp_path):
    w, mask = torch.tensor([[1e6, float("nan")]]), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(LobsError, match=r"'w' holds values that are not finite; int8"):
        lobs.storage.save_compact({"w": w}, tmp_path / "x", {"w": mask}, values="int8")
    with pytest.raises(LobsError, match=r"'w' holds 1e\+06; float16 ends at 65504"):
        lobs.storage.save_compact(
            {"w": w[:, :1]}, tmp_path / "x", {"w": mask[:, :1]}, values="float16"
        )
    with pytest.raises(LobsError, match="values='int4' is unknown"):
        lobs.storage.save_compact({"w": w}, tmp_path / "x", {"w": mask}, values="int4")
    with pytest.raises(LobsError, match="Apply the mask first"):
        lobs.storage.save_compact({"w": w}, tmp_path / "x", {"w": ~mask})
    assert not list(tmp_path.iterdir())


def test_dense_tensors_keep_their_names_for_any_reader(tmp_path):
    w, mask = random_masked(50, 50)
    bias = torch.randn(50)
    lobs.storage.save_compact({"w": w, "b": bias}, tmp_path / "x", {"w": mask})
    assert torch.equal(load_file(tmp_path / "x")["b"], bias)


def test_names_that_collide_are_refused(tmp_path):
    w, mask = random_masked(5, 100)
    with pytest.raises(LobsError, match="two tensors would be stored as 'w:values'"):
        lobs.storage.save_compact({"w": w, "w:values": torch.ones(3)}, tmp_path / "x", {"w": mask})


def test_what_is_loaded_does_not_change_with_the_file(tmp_path):
    path = lobs.storage.save_compact({"b": torch.ones(5000)}, tmp_path / "x").path
    loaded = lobs.load(path)
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))  # in place, as a careless program would
    assert torch.equal(loaded.state_dict["b"], torch.ones(5000))


def resign(path, change):
    """Change a file's layout as someone could who knows how to compute the hash."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
    stored = load_file(path)
    layout = json.loads(header["layout"])
    change(layout, stored)
    header["layout"] = json.dumps(layout)
    header["sha256"] = digest_of(header, stored)
    save_file(stored, path, metadata=header)


HOSTILE = {
    "bomb": lambda lay, _: lay["w"].update(shape=[2**20, 2**20]),
    "larger": lambda lay, _: lay["w"].update(shape=[2**16, 50]),
    "smaller": lambda lay, _: lay["w"].update(shape=[2, 50]),
    "negative": lambda lay, _: lay["w"].update(shape=[-50, -50]),
    "fraction": lambda lay, _: lay["w"].update(shape=[50.0, 50]),
    "count": lambda lay, _: lay["w"].update(count=lay["w"]["count"] + 1),
    "truth": lambda lay, _: lay["w"].update(count=True),
    "width": lambda lay, _: lay["w"].update(width=63),
    "dtype": lambda lay, _: lay["w"].update(dtype="float64"),
    "unknown": lambda lay, _: lay["w"].update(dtype="__import__"),
    "code": lambda lay, _: lay["w"].update(code="bits"),
    "mask": lambda lay, _: lay["w"].update(mask="full"),
    "lying mask": lambda lay, st: (
        lay["w"].update(mask="own"),
        st.update({"w:mask": torch.zeros(313, dtype=torch.uint8)}),
    ),
    "extra field": lambda lay, _: lay["w"].update(more=1),
    "missing part": lambda _, st: st.pop("w:gaps"),
    "foreign part": lambda _, st: st.update(foreign=torch.ones(2)),
    "no entry": lambda lay, _: lay.pop("w"),
    "top bytes": lambda _, st: st.update({"w:top": st["w:top"][:-4]}),
    "top bomb": lambda _, st: st.update(
        {"w:top": torch.frombuffer(bytearray(zlib.compress(bytes(10**7))), dtype=torch.uint8)}
    ),
    "rest": lambda _, st: st.update({"w:rest": st["w:rest"][:-3]}),
    "half": lambda lay, _: lay["w"].update(values="float16"),
    "bias shape": lambda lay, _: lay["b"].update(shape=[5, 10]),
    "bytes as truth": lambda lay, st: (
        lay["b"].update(dtype="bool"),
        st.update(b=torch.full((50,), 7, dtype=torch.uint8)),
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_layouts_with_a_right_hash_are_refused(tmp_path, kind):
    w, mask = random_masked(50, 50, keep=0.2)
    path = lobs.storage.save_compact(
        {"w": w, "b": torch.randn(50)}, tmp_path / "x", {"w": mask}
    ).path
    resign(path, HOSTILE[kind])
    with pytest.raises(LobsError, match="damaged layout"):
        lobs.load(path)


def test_other_versions_and_wrong_hashes_are_named(tmp_path):
    path = lobs.storage.save_compact(nn.Linear(3, 3), tmp_path / "x").path
    with safe_open(path, "pt") as file:
        header = file.metadata()
    save_file(load_file(path), path, metadata={**header, "version": "2"})
    with pytest.raises(LobsError, match="format version 2; this lobs reads version 1"):
        lobs.load(path)
    save_file(load_file(path), path, metadata={**header, "record": '{"kept": 1}'})
    with pytest.raises(LobsError, match="does not have the hash"):
        lobs.load(path)
