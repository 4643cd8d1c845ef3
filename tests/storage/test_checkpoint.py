from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lobs
from lobs import LobsError
from lobs.storage import save_compact


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
    loaded = lobs.load(lobs.save(model, tmp_path / "tied.safetensors"))
    assert torch.equal(loaded.state_dict["0.weight"], loaded.state_dict["1.weight"])


def test_a_mask_that_does_not_hold_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    with pytest.raises(LobsError, match="6 weights that its mask removes are not zero"):
        lobs.save(model, tmp_path / "x", {"weight": torch.zeros(2, 3, dtype=torch.bool)})
    with pytest.raises(LobsError, match="must be bool"):
        lobs.save(model, tmp_path / "x", {"weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(LobsError, match="names no tensor"):
        lobs.save(model, tmp_path / "x", {"nope": torch.ones(2, 3, dtype=torch.bool)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_gives_one_clear_line(tmp_path):
    with pytest.raises(LobsError, match="cannot write"):
        lobs.save(nn.Linear(2, 2), tmp_path / "missing" / "x.safetensors")


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = lobs.save(nn.Linear(2, 2), tmp_path / "x.safetensors")
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lobs.storage.checkpoint.save_file", full)
    with pytest.raises(LobsError, match="No space left"):
        lobs.save(nn.Linear(2, 2), path)
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


@pytest.mark.parametrize("write", [lobs.save, save_compact])
def test_a_swapped_order_is_answered_with_the_right_line(tmp_path, write):
    path = str(tmp_path / "x.safetensors")
    with pytest.raises(LobsError, match=re.escape(f"{write.__name__}(model, {path!r})")):
        write(path, nn.Linear(2, 2))
    with pytest.raises(LobsError, match="path is a dict: give a file name"):
        write(nn.Linear(2, 2), {})
    with pytest.raises(LobsError, match="model is a int: give a network or a state dict"):
        write(3, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [lobs.save, save_compact])
@pytest.mark.parametrize("extension", [".pt", ".pth", ".bin", ".PT", ".onnx", ".html"])
def test_the_extension_of_another_format_is_refused(tmp_path, write, extension):
    with pytest.raises(LobsError, match=r"name it 'x\.safetensors'"):
        write(nn.Linear(2, 2), tmp_path / f"x{extension}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [lobs.save, save_compact])
def test_a_target_that_cannot_be_written_is_refused_before_the_work(tmp_path, write, monkeypatch):
    def worked(*_):
        raise AssertionError("the weights were packed first")

    monkeypatch.setattr("lobs.storage.checkpoint._tensors", worked)
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "missing" / "x.safetensors", "there is no folder"),
        (tmp_path / "x\0.safetensors", "cannot write"),
    ):
        with pytest.raises(LobsError, match=reason):
            write(nn.Linear(2, 2), path)
    monkeypatch.setattr("lobs.storage.outputs.os.access", lambda *_: False)
    with pytest.raises(LobsError, match="is read-only"):
        write(nn.Linear(2, 2), tmp_path / "x.safetensors")


def test_a_checkpoint_shows_no_numbers_of_its_tensors(tmp_path):
    shown = repr(lobs.load(pruned().save(tmp_path / "net.safetensors")))
    assert shown.startswith("Checkpoint(4 tensors with 225 numbers, 2 masks")
    assert "tensor(" not in shown and "\n" not in shown
