"""Folders of shards are read tensor by tensor; every bad folder is one clear line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from lobs import LobsError
from lobs.storage.shards import INDEX, Shards, copy_others, output_folder, write_index, write_shard


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 4, generator=generator),
        "b.weight": torch.randn(2, 2, generator=generator).bfloat16(),
        "b.count": torch.tensor(7),
    }


def folder(path, split=True):
    """Write a folder of two shards and an index, or of one file."""
    path.mkdir()
    if not split:
        save_file(tensors(), path / "model.safetensors")
        return path
    parts = {"one.safetensors": ["a.weight"], "two.safetensors": ["b.weight", "b.count"]}
    for file, names in parts.items():
        save_file({name: tensors()[name] for name in names}, path / file)
    write_index(path, {name: file for file, names in parts.items() for name in names}, 64)
    return path


def refused(work):
    with pytest.raises(LobsError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("split", [True, False])
def test_every_tensor_comes_back_to_the_bit(tmp_path, split):
    shards = Shards(folder(tmp_path / "big", split))
    found = shards.read(tensors())
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    assert shards.bytes(tensors()) == 12 * 4 + 4 * 2 + 8


def test_only_the_shards_of_the_wanted_tensors_are_opened(tmp_path):
    shards = Shards(folder(tmp_path / "big"))
    (tmp_path / "big" / "two.safetensors").unlink()
    assert torch.equal(shards.read(["a.weight"])["a.weight"], tensors()["a.weight"])
    assert "two.safetensors" in refused(lambda: shards.read(["b.count"]))


def test_the_digest_sees_weights_and_not_the_layout(tmp_path):
    one, two = (Shards(folder(tmp_path / name, split)) for name, split in (("x", True), ("y", 0)))
    assert one.digest == two.digest
    changed = tensors()
    changed["a.weight"][0, 0] += 1
    save_file(changed, tmp_path / "y" / "model.safetensors")
    assert Shards(tmp_path / "y").digest != one.digest


def test_missing_folders_files_and_shards_are_named(tmp_path):
    assert "does not exist" in refused(lambda: Shards(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(lambda: Shards(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "holds neither 'model.safetensors' nor" in refused(lambda: Shards(tmp_path / "empty"))
    big = folder(tmp_path / "big")
    (big / "two.safetensors").unlink()
    assert "names the shard 'two.safetensors'" in refused(lambda: Shards(big))


@pytest.mark.parametrize("kept", [0, 4, 60, 150])
def test_a_truncated_file_is_named(tmp_path, kept):
    big = folder(tmp_path / "big")
    whole = (big / "one.safetensors").read_bytes()
    assert len(whole) > 110
    (big / "one.safetensors").write_bytes(whole[: min(kept, len(whole) - 1)])
    assert "one.safetensors' is no whole safetensors file" in refused(lambda: Shards(big))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    big = folder(tmp_path / "big")
    (big / INDEX).write_text(text)
    assert "is no index of shards" in refused(lambda: Shards(big))


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", ""])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, name):
    big = folder(tmp_path / "big")
    save_file(tensors(), tmp_path / "one.safetensors")
    (big / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    assert "not in the folder" in refused(lambda: Shards(big))


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    big = folder(tmp_path / "big")
    listed = json.loads((big / INDEX).read_text())["weight_map"] | {"c": "one.safetensors"}
    write_index(big, listed, 64)
    assert "'one.safetensors' holds 'c', but it does not" in refused(lambda: Shards(big))


def test_missing_tensors_and_other_shapes_and_types_are_named(tmp_path):
    shards = Shards(folder(tmp_path / "big"))
    shards.check("a.weight", torch.empty(3, 4, device="meta"))
    assert "no tensor 'c'" in refused(lambda: shards.check("c", torch.empty(1)))
    text = refused(lambda: shards.check("a.weight", torch.empty(4, 3)))
    assert "3×4 in 'one.safetensors' and 4×3 in the model" in text
    text = refused(lambda: shards.check("b.weight", torch.empty(2, 2)))
    assert "bfloat16 in 'two.safetensors' and float32" in text
    assert "model.to(torch.bfloat16)" in text


def test_files_without_weights_are_copied_and_links_are_not(tmp_path):
    big, small = folder(tmp_path / "big"), tmp_path / "small"
    small.mkdir()
    (big / "config.json").write_text("{}")
    (big / "tokenizer.model").write_bytes(b"\0\1")
    (big / "pytorch_model.bin").write_bytes(b"dense")
    (big / "inner").mkdir()
    (big / "link.json").symlink_to(tmp_path / "secret")
    assert copy_others(big, small) == ["inner", "link.json"]
    assert {p.name for p in small.iterdir()} == {"config.json", "tokenizer.model"}
    assert (small / "tokenizer.model").read_bytes() == b"\0\1"


def test_links_of_a_hugging_face_cache_are_followed_and_others_are_not(tmp_path):
    blobs, snapshot = tmp_path / "models" / "blobs", tmp_path / "models" / "snapshots" / "abc"
    for made in (blobs, snapshot, tmp_path / "out"):
        made.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (tmp_path / "secret").write_text("private")
    (snapshot / "config.json").symlink_to(blobs / "123")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    assert copy_others(snapshot, tmp_path / "out") == ["notes.txt"]
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert not (tmp_path / "out" / "config.json").is_symlink()


def test_the_output_may_not_be_the_source_a_link_or_in_use(tmp_path):
    big = folder(tmp_path / "big")
    (tmp_path / "link").symlink_to(big)
    assert "the source itself" in refused(lambda: output_folder(big, big, None))
    assert "the source itself" in refused(lambda: output_folder(tmp_path / "link", big, None))
    assert "a link" in refused(lambda: output_folder(big, tmp_path / "link", None))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "holds 'thesis.txt'" in refused(lambda: output_folder(big, tmp_path / "full", None))
    out, store = output_folder(big, tmp_path / "new", None)
    assert out.is_dir() and store.parent == out


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.safetensors"
    write_shard(path, {"a": torch.randn(2, 3).T})
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_shard(path, {"a": None})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
