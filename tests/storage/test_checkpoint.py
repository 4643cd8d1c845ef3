from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lobs
from lobs import LobsError


def pruned():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 5))
    return lobs.prune(model, [torch.randn(30, 1, 5, 5)], lobs.Sparsity(0.7), progress=False)


def test_round_trip_is_bit_equal(tmp_path):
    result = pruned()
    with torch.no_grad():  # a kept weight that happens to be zero, and a negative zero
        kept = result.masks["2.weight"].nonzero()[0]
        result.model[2].weight[tuple(kept)] = 0.0
        result.model[2].bias[0] = -0.0
    path = result.save(tmp_path / "net.safetensors", note="hello")
    loaded = lobs.load(path)
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(loaded.state_dict[name].view(torch.uint8), tensor.view(torch.uint8))
    assert loaded.masks.keys() == result.masks.keys()
    assert all(torch.equal(loaded.masks[k], v) for k, v in result.masks.items())
    assert loaded.record["kept"] == result.kept and loaded.record["note"] == "hello"


def test_any_safetensors_reader_can_load_the_weights(tmp_path):
    result = pruned()
    path = result.save(tmp_path / "net.safetensors")
    fresh = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 5))
    fresh.load_state_dict(load_file(path))
    x = torch.randn(3, 1, 5, 5)
    assert torch.equal(fresh(x), result.model(x))


def test_a_plain_safetensors_file_loads_without_masks(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "plain.safetensors")
    loaded = lobs.load(tmp_path / "plain.safetensors")
    assert loaded.masks == {} and torch.equal(loaded.state_dict["w"], torch.ones(2))


def test_tied_tensors_are_saved(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    loaded = lobs.load(lobs.save(tmp_path / "tied.safetensors", model))
    assert torch.equal(loaded.state_dict["0.weight"], loaded.state_dict["1.weight"])


def test_a_mask_that_does_not_hold_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    with pytest.raises(LobsError, match="6 weights that its mask removes are not zero"):
        lobs.save(tmp_path / "x", model, {"weight": torch.zeros(2, 3, dtype=torch.bool)})
    with pytest.raises(LobsError, match="must be bool"):
        lobs.save(tmp_path / "x", model, {"weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(LobsError, match="names no tensor"):
        lobs.save(tmp_path / "x", model, {"nope": torch.ones(2, 3, dtype=torch.bool)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_gives_one_clear_line(tmp_path):
    with pytest.raises(LobsError, match="cannot write"):
        lobs.save(tmp_path / "missing" / "x.safetensors", nn.Linear(2, 2))


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = lobs.save(tmp_path / "x.safetensors", nn.Linear(2, 2))
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lobs.storage.checkpoint.save_file", full)
    with pytest.raises(LobsError, match="No space left"):
        lobs.save(path, nn.Linear(2, 2))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["missing", "text", "cut", "version", "mask", "count", "bomb"])
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "net.safetensors"
    pruned().save(path)
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("hello")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        import base64
        import zlib

        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            header = file.metadata()
        masks = json.loads(header["masks"])
        if damage == "version":
            header["version"] = "99"
        if damage == "mask":
            masks["0.weight"]["kept_zeros"] = "!!"
        if damage == "count":
            masks["0.weight"]["kept"] += 1
        if damage == "bomb":
            masks["0.weight"]["kept_zeros"] = base64.b64encode(zlib.compress(bytes(10**7))).decode()
        header["masks"] = json.dumps(masks)
        save_file(load_file(path), path, metadata=header)
    with pytest.raises(LobsError):
        lobs.load(path)
