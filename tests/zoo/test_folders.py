from __future__ import annotations

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

from lobs import LobsError
from lobs.zoo.datasets import cifar10, imagenet, sets


def records(n, seed=0):
    made = np.random.default_rng(seed).integers(0, 256, (n, 3073), dtype=np.uint8)
    made[:, 0] %= 10
    return made


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    hashes = {}
    (tmp_path / "a" / "cifar-10-batches-bin").mkdir(parents=True)
    for seed, name in enumerate(cifar10._HASHES):
        raw = records(20, seed).tobytes()
        (tmp_path / "a" / "cifar-10-batches-bin" / name).write_bytes(raw)
        hashes[name] = hashlib.sha256(raw).hexdigest()
    monkeypatch.setattr(cifar10, "_HASHES", hashes)
    monkeypatch.delenv("LOBS_DATA", raising=False)
    return tmp_path


def test_cifar_is_found_below_the_folder_or_through_the_environment(cifar, monkeypatch):
    train, test = (
        cifar10.load("train", cifar),
        cifar10.load("test", cifar / "a" / "cifar-10-batches-bin"),
    )
    assert train.images.shape == (100, 3, 32, 32) and len(test) == 20
    monkeypatch.setenv("LOBS_DATA", str(cifar / "a"))
    assert torch.equal(sets.load("cifar10", "test").images, test.images)


def test_cifar_pixels_and_labels_are_where_the_format_says(cifar):
    first = records(20, 0)[0]
    train = cifar10.load("train", cifar)
    assert int(train.labels[0]) == first[0]
    green = (first[1 + 1024 + 5 * 32 + 7] / 255 - cifar10.MEAN[1]) / cifar10.DEVIATION[1]
    assert float(train.images[0, 1, 5, 7]) == pytest.approx(green, abs=1e-5)


def test_damaged_and_missing_cifar_say_what_to_do(cifar, tmp_path):
    for folder, message in (
        (None, "neither --data nor LOBS_DATA"),
        (tmp_path / "no", "there is no"),
        (tmp_path / "a" / "..", None),
    ):
        if message:
            with pytest.raises(LobsError, match=message) as caught:
                cifar10.load("test", folder)
            assert "lobs data cifar10 FOLDER" in str(caught.value)
    path = cifar / "a" / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(LobsError, match="is damaged"):
        cifar10.load("test", cifar)
    (path.parent / "data_batch_3.bin").unlink()
    with pytest.raises(LobsError, match=r"data_batch_3.bin' is missing"):
        cifar10.load("train", cifar)


def test_a_download_is_unpacked_checked_and_not_repeated(cifar, tmp_path):
    source = cifar / "a" / "cifar-10-batches-bin"
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "cifar-10-batches-bin")
        tar.addfile(tarfile.TarInfo("../escape.txt"), io.BytesIO())
    where = cifar10.download(tmp_path / "new", archive.as_uri())
    assert torch.equal(cifar10.load("test", where).images, cifar10.load("test", source).images)
    assert {p.name for p in where.iterdir()} == set(cifar10._HASHES)
    archive.unlink()
    assert cifar10.download(tmp_path / "new", archive.as_uri()) == where
    with pytest.raises(LobsError, match="cannot download"):
        cifar10.download(tmp_path / "other", archive.as_uri())


def jpeg(colour, size=(300, 260)):
    image = pytest.importorskip("PIL.Image")
    held = io.BytesIO()
    image.new("RGB", size, colour).save(held, "PNG")
    return held.getvalue()


@pytest.fixture
def images(tmp_path):
    """Two classes of two images, in a folder and in a tar."""
    with tarfile.open(tmp_path / "imagenet-val.tar", "w") as tar:
        for label in (3, 11):
            for index in range(2):
                raw = jpeg((label * 20, index * 50, 7))
                path = tmp_path / "folders" / "val" / f"{label:04d}" / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)
                info = tarfile.TarInfo(f"val/{label:04d}/{index}.png")
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    return tmp_path


def test_a_tar_is_read_like_the_folders_it_holds(images):
    tar, folder = (
        imagenet.load("val", images, batch_size=3),
        imagenet.load("val", images / "folders", batch_size=3),
    )
    assert tar.source.suffix == ".tar" and tar.samples == 4 and len(tar) == 2
    for (x, y), (u, v) in zip(tar, folder, strict=True):
        assert torch.equal(x, u) and torch.equal(y, v) and x.shape[1:] == (3, 224, 224)
    assert torch.cat([y for _, y in tar]).tolist() == [
        3,
        3,
        11,
        11,
    ]  # numbers are the classes themselves
    assert [y.tolist() for _, y in tar.batches(2, limit=2)] == [[3, 11]]
    assert len(list(tar)) == len(list(tar)) == 2  # again and again


def test_scaling_is_that_of_the_networks(images):
    caffe = next(iter(imagenet.load("val", images, scaling="caffe")))[0]
    vision = next(iter(imagenet.load("val", images)))[0]
    assert float(caffe[0, 0, 0, 0]) == pytest.approx(60 - 123.68, abs=1e-4)
    assert float(vision[0, 0, 0, 0]) == pytest.approx((60 / 255 - 0.485) / 0.229, abs=1e-4)


def test_an_image_of_the_right_size_is_taken_as_it_is_and_others_are_cropped_at_the_centre():
    image = pytest.importorskip("PIL.Image")
    made = image.new("RGB", (512, 256))
    made.paste(
        (255, 0, 0), (144, 16, 368, 240)
    )  # exactly the centre of a picture twice as wide as high
    held = io.BytesIO()
    made.save(held, "PNG")
    got = imagenet.decoded(held.getvalue(), "x")
    assert bool((got[0] == 255).all()) and bool((got[1:] == 0).all())
    assert imagenet.decoded(jpeg((9, 9, 9), (224, 224)), "x").unique().tolist() == [9]


def test_missing_imagenet_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("LOBS_DATA", raising=False)
    with pytest.raises(LobsError, match=r"image-net\.org"):
        imagenet.load("val")
    (tmp_path / "val").mkdir()
    with pytest.raises(LobsError, match="holds no class folders"):
        imagenet.load("val", tmp_path)
    (tmp_path / "imagenet-val.tar").write_bytes(b"no")
    with pytest.raises(LobsError, match="not a readable tar"):
        imagenet.load("val", tmp_path)
    pytest.importorskip("PIL")
    with pytest.raises(LobsError, match="is not a readable image"):
        imagenet.decoded(b"no", "x")
    with pytest.raises(LobsError, match="There are: mnist, cifar10"):
        sets.load("svhn", "test")
