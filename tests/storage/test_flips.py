"""One flipped bit in any file that we write and read back is an error, never another result."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import lobs
from lobs import Execution, LobsError, Sparsity
from lobs.training import Shuffled


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def silent(path, read, flips, seed=0):
    """Flip single bits of a file; return the places where `read` gave another answer."""
    data, rng, found = path.read_bytes(), random.Random(seed), []
    right = read()
    for _ in range(flips):
        place = rng.randrange(8 * min(len(data), 4000) if rng.random() < 0.5 else 8 * len(data))
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            if read() != right:
                found.append(place)
        except LobsError:
            pass
    path.write_bytes(data)
    return found


def bits(state):
    return {n: (str(t.dtype), t.shape, t.numpy().tobytes()) for n, t in state.items()}


def test_of_a_checkpoint(tmp_path):
    result = lobs.prune(network(), [torch.randn(40, 6)], keep=0.5, progress=False)
    path = result.save(tmp_path / "x.safetensors")

    def read():
        loaded = lobs.load(path)
        return bits(loaded.state_dict), bits(loaded.masks), loaded.record

    assert silent(path, read, 300) == []


def test_of_a_run_store(tmp_path):
    data = [torch.randn(40, 6)]
    options = {"progress": False, "execution": Execution(resume=tmp_path)}

    def read():
        return bits(lobs.prune(network(), data, Sparsity(0.5), **options).model.state_dict())

    read()
    for path in sorted(tmp_path.iterdir()):
        if path.name != ".lock":
            assert silent(path, read, 6) == [], path.name


def test_of_a_training_state(tmp_path):
    torch.manual_seed(0)
    data = Shuffled(torch.randn(40, 6), torch.randint(3, (40,)), 10)
    masks = {"0.weight": torch.ones(5, 6, dtype=torch.bool)}

    def read():
        execution = Execution(resume=tmp_path)
        options = {"iterations": 8, "every": 4, "progress": False, "execution": execution}
        return bits(lobs.retrain(network(), masks, data, **options).model.state_dict())

    read()
    (path,) = tmp_path.glob("*.safetensors")
    assert silent(path, read, 60) == []


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_file_of_the_first_version_is_read_but_a_file_without_its_hash_is_not(tmp_path, version):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = lobs.save(nn.Linear(3, 2), tmp_path / "x.safetensors")
    with safe_open(path, "pt") as file:
        header = file.metadata()
    del header["sha256"]
    save_file(load_file(path), path, metadata={**header, "version": version})
    if version == "1":
        assert lobs.load(path).state_dict["weight"].shape == (2, 3)
    else:
        with pytest.raises(LobsError, match="does not have the hash"):
            lobs.load(path)
