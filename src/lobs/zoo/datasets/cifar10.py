"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32×32 in ten classes.

Only the published binary form is read: one label byte and 3,072 pixel bytes an image. The version
for Python is a pickle, which `lobs` never opens. Hashes are checked on every load. Pixels are
scaled to [0, 1], then to mean 0 and deviation 1 by channel, with the training set's numbers.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch

from lobs.errors import DataError
from lobs.zoo.datasets import folders
from lobs.zoo.datasets.labelled import LabelledImages, Split

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
_HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_STEPS = (
    "Run `lobs data cifar10 FOLDER`, which downloads 162 MB and checks it; or unpack "
    "cifar-10-binary.tar.gz (the binary "
    f"version, not the one for Python) from {URL} into FOLDER. Then pass --data FOLDER or set "
    "LOBS_DATA=FOLDER."
)


def load(split: Split, folder: str | os.PathLike[str] | None = None) -> LabelledImages:
    """Return one split from `folder` or LOBS_DATA; up to two folders below are searched."""
    names = [name for name in _HASHES if name.startswith("data" if split == "train" else "test")]
    where = folders.find([names[0]], folder, what="CIFAR-10", steps=_STEPS).parent
    parts = []
    for name in names:
        path = where / name
        if not path.is_file():
            raise DataError(f"CIFAR-10: '{path}' is missing. {_STEPS}")
        folders.check_hash(path, _HASHES[name], "CIFAR-10")
        parts.append(np.fromfile(path, np.uint8).reshape(-1, 3073))
    return decode(np.concatenate(parts))


def decode(records: np.ndarray) -> LabelledImages:
    """Return labels and scaled images from records of 3,073 bytes."""
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32))
    mean, deviation = (torch.tensor(v).view(3, 1, 1) * 255.0 for v in (MEAN, DEVIATION))
    return LabelledImages(
        images.sub_(mean).div_(deviation), torch.from_numpy(records[:, 0].astype(np.int64))
    )


def download(folder: str | os.PathLike[str], url: str = URL) -> Path:
    """Download the binary version into `folder`, check every hash, and return where it is.

    Files that are there already are kept.
    """
    where = Path(folder).expanduser() / FOLDER
    where.mkdir(parents=True, exist_ok=True)
    if not all((where / name).is_file() for name in _HASHES):
        try:
            _fetch(url, where)
        except (OSError, tarfile.TarError) as error:
            raise DataError(f"CIFAR-10: cannot download {url}: {error}. {_STEPS}") from error
    for name, sha256 in _HASHES.items():
        if not (where / name).is_file():
            raise DataError(f"CIFAR-10: {url} holds no '{name}'. {_STEPS}")
        folders.check_hash(where / name, sha256, "CIFAR-10")
    return where


def _fetch(url: str, where: Path) -> None:
    with tempfile.TemporaryDirectory(dir=where) as partial:
        archive = Path(partial) / "archive.tar.gz"
        urllib.request.urlretrieve(url, archive)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                file = (
                    tar.extractfile(member) if name in _HASHES else None
                )  # only plain files of known names are written
                if file is not None:
                    (Path(partial) / name).write_bytes(file.read())
                    os.replace(Path(partial) / name, where / name)
