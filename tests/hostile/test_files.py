"""Damaged files: a checkpoint with changed bytes is refused or obeys its masks; no code is run."""

from __future__ import annotations

import io
import random
import tarfile

import pytest
import torch

import lobs
from lobs.certificate.verify import verify_masks
from lobs.errors import DataError
from lobs.zoo.datasets import cifar10, imagenet
from tests.hostile.running import faults
from tests.storage.compact.test_fuzz import MUTATIONS


def original(path, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 5, generator=generator) < 0.4
    state = {
        "a.weight": torch.randn(6, 5, generator=generator) * mask,
        "a.bias": torch.zeros(6),
        "n": torch.tensor(3),
    }
    rows = [
        {
            "name": "a",
            "kept": int(mask.sum()),
            "total": 30,
            "error": 0.5,
            "parameters": {"a.weight": [0, 6]},
        }
    ]
    lobs.save(state, path, {"a.weight": mask}, {"layers": rows, "network": "os:getcwd"})
    return path.read_bytes()


def wrong_file(path):
    def wrong(seed):
        rng = random.Random(seed)
        data = rng.choice(MUTATIONS)(original(path, seed % 7), rng)
        if len(data) > 60 and rng.random() < 0.3:
            data = rng.choice(MUTATIONS[:6])(data, rng)
        path.write_bytes(data)
        loaded = lobs.load(path)
        verify_masks(loaded)
        broken = [n for n, m in loaded.masks.items() if bool((loaded.state_dict[n][~m] != 0).any())]
        return f"mask {broken[0]} claims zeros that are not there" if broken else None

    return wrong


@pytest.mark.parametrize("start", range(0, 200, 100))
def test_a_damaged_checkpoint_is_refused_or_obeys_its_masks(tmp_path, start):
    assert faults(wrong_file(tmp_path / "x.safetensors"), range(start, start + 100)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 14_000, 500))
def test_four_thousand_damaged_checkpoints(tmp_path, start):
    assert faults(wrong_file(tmp_path / "x.safetensors"), range(start, start + 500)) == {}


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in (
            "../data_batch_1.bin",
            "/tmp/lobs-escaped.bin",
            "x/../../test_batch.bin",
            "unknown.bin",
        ):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(DataError, match=r"holds no|damaged"):
        cifar10.download(tmp_path / "target", archive.as_uri())
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    inside = {f"target/{cifar10.FOLDER}/{n}" for n in ("data_batch_1.bin", "test_batch.bin")}
    assert found <= {"evil.tar.gz"} | inside


def image_file(size):
    from PIL import Image

    raw = io.BytesIO()
    Image.new("RGB", size).save(raw, "PNG")
    return raw.getvalue()


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1)])
def test_an_image_that_would_swell_is_refused_before_it_does(size):
    with pytest.raises(DataError, match=r"'x.png' is .*5000"):
        imagenet.decoded(image_file(size), "x.png")


def test_a_damaged_image_is_read_or_refused():
    raw, rng = image_file((230, 240)), random.Random(0)

    def wrong(_):
        image = imagenet.decoded(rng.choice(MUTATIONS[:5])(raw, rng), "x.png")
        return None if tuple(image.shape) == (3, 224, 224) else f"shape {tuple(image.shape)}"

    assert faults(wrong, range(60)) == {}
