"""MNIST (LeCun, Cortes, Burges), shipped with the package as its four canonical idx files.

The files are byte-identical to the published ones; their hashes are checked on every load, so a
damaged installation cannot quietly change a result. Pixels are scaled to [0, 1].
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources

import numpy as np
import torch

from lobs.errors import DataError
from lobs.zoo.datasets.labelled import LabelledImages, Split

_FILES: dict[Split, tuple[tuple[str, str], tuple[str, str]]] = {
    "train": (
        (
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
    ),
    "test": (
        (
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
}


def load(split: Split) -> LabelledImages:
    """Load one split from the files inside the package, checking their hashes."""
    (image_file, image_hash), (label_file, label_hash) = _FILES[split]
    images = _idx(_checked(image_file, image_hash)).astype(np.float32) / 255.0
    labels = _idx(_checked(label_file, label_hash)).astype(np.int64)
    return LabelledImages(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels))


def _checked(name: str, sha256: str) -> bytes:
    path = resources.files("lobs.zoo.datasets") / "mnist_files" / name
    if not path.is_file():
        raise DataError(
            f"MNIST file '{name}' is missing from the installed package. Reinstall lobs."
        )
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise DataError(
            f"MNIST file '{name}' is damaged: sha256 {found[:12]}…, expected {sha256[:12]}…. "
            "Reinstall lobs."
        )
    return gzip.decompress(raw)


def _idx(raw: bytes) -> np.ndarray:
    """Decode an idx file.

    It holds two zero bytes, a type code (8 = uint8), the rank, the big-endian sizes, the bytes.
    """
    rank = raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=rank, offset=4))
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
