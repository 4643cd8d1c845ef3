"""ImageNet (ILSVRC-2012), from class folders on disk or in a tar file that is read in place.

Images are scaled so that their shorter side is 256 and cropped to the centre 224×224; those that
are 224×224 already are taken as they are. Class folders named by number are that class; otherwise
classes are counted in the order of their names, as torchvision does. Decoding needs Pillow: `pip
install 'lobs[imagenet]'`.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lobs.errors import DataError
from lobs.zoo.datasets import folders

Scaling = Literal["torchvision", "caffe", "lite"]
_SIDE, _SHORTER = 224, 256
_LONGEST = 100  # times the shorter side: scaling a line up to 224 pixels would take gigabytes
_SUFFIXES = (".jpg", ".jpeg", ".png")
# What networks expect: torchvision's were trained on [0, 1] less a mean over a deviation, the first
# ones on 0–255 less a mean, EfficientNet-Lite on about [-1, 1].
_SCALINGS: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "torchvision": (1 / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "caffe": (1.0, (123.68, 116.779, 103.939), (1.0, 1.0, 1.0)),
    "lite": (1.0, (127.0, 127.0, 127.0), (128.0, 128.0, 128.0)),
}
_STEPS = (
    "Register at https://image-net.org, download ILSVRC2012_img_val.tar (6.3 GB) or the training "
    "images, sort them into one "
    "folder a class (val/<class>/<image>.JPEG), or put those folders into a tar file. Then pass "
    "--data FOLDER_OR_TAR or set "
    "LOBS_DATA."
)


@dataclass(frozen=True)
class ImageNet:
    """Batches of (images, labels), decoded at every pass; memory holds one batch."""

    source: Path
    scaling: Scaling
    batch_size: int
    entries: tuple[tuple[str, int], ...] = field(repr=False)

    def batches(self, size: int = 50, limit: int | None = None) -> ImageNet:
        """Return the images in other batches; `limit` of them, spread evenly over the classes."""
        entries = self.entries
        if limit is not None and limit < len(entries):
            entries = tuple(entries[i * len(entries) // limit] for i in range(limit))
        # Whole batches are decoded at once: more than this many images would take a gigabyte on
        # their way through a network.
        return replace(self, batch_size=min(size, 50), entries=entries)

    @property
    def samples(self) -> int:
        """Return the number of images."""
        return len(self.entries)

    def __len__(self) -> int:
        return (len(self.entries) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with _Reader(self.source) as read:
            for start in range(0, len(self.entries), self.batch_size):
                part = self.entries[start : start + self.batch_size]
                images = torch.stack(
                    [scaled(decoded(read(name), name), self.scaling) for name, _ in part]
                )
                yield images, torch.tensor([label for _, label in part])


def load(
    split: Literal["train", "val"],
    source: str | os.PathLike[str] | None = None,
    *,
    scaling: Scaling = "torchvision",
    batch_size: int = 50,
    limit: int | None = None,
) -> ImageNet:
    """Return a split of ImageNet.

    Args:
        split: "train" or "val".
        source: a folder of class folders, a tar of them, or a folder that holds either; LOBS_DATA
            by default.
        scaling: how pixels become numbers; see `scaled`.
        batch_size: images a batch.
        limit: number of images, spread evenly over the classes; all by default.
    """
    if scaling not in _SCALINGS:
        raise DataError(f"scaling is '{scaling}': use {' or '.join(_SCALINGS)}.")
    where = _find(split, source)
    entries = _entries(where)
    if not entries:
        raise DataError(
            f"ImageNet: '{where}' holds no class folders with {', '.join(_SUFFIXES)} images. "
            f"{_STEPS}"
        )
    return ImageNet(where, scaling, batch_size, tuple(entries)).batches(batch_size, limit)


def decoded(raw: bytes, name: str) -> Tensor:
    """Return the centre crop of one image file as (3, 224, 224) bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading ImageNet's images needs Pillow: pip install 'lobs[imagenet]'."
        ) from error
    try:
        image: Any = Image.open(io.BytesIO(raw))
        if max(image.size) > _LONGEST * min(image.size):
            raise DataError(
                f"ImageNet: '{name}' is {image.size[0]}×{image.size[1]}; no image has such sides. "
                "Remove it."
            )
        image = image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # a damaged file makes Pillow raise many kinds
        raise DataError(f"ImageNet: '{name}' is not a readable image: {error}.") from error
    if image.size != (_SIDE, _SIDE):
        factor = _SHORTER / min(image.size)
        wide, high = (max(_SIDE, round(side * factor)) for side in image.size)
        left, top = (wide - _SIDE) // 2, (high - _SIDE) // 2
        image = image.resize((wide, high), Image.Resampling.BILINEAR).crop(
            (left, top, left + _SIDE, top + _SIDE)
        )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def scaled(image: Tensor, scaling: Scaling) -> Tensor:
    """Return pixel bytes as the numbers that a network was trained on."""
    factor, mean, deviation = _SCALINGS[scaling]
    return (image.float() * factor - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(
        deviation
    ).view(3, 1, 1)


def _find(split: str, source: str | os.PathLike[str] | None) -> Path:
    chosen = source if source is not None else os.environ.get("LOBS_DATA")
    if chosen is not None and Path(chosen).is_dir():
        # Any tar whose name says what it is, before a folder of that name.
        for path in sorted(Path(chosen).glob("*imagenet*.tar")):
            if split in path.name:
                return path
    return folders.find([split, f"imagenet/{split}"], source, what="ImageNet", steps=_STEPS)


def _entries(where: Path) -> list[tuple[str, int]]:
    if where.is_file():
        try:
            with tarfile.open(where) as tar:
                names = [m.name for m in tar if m.isfile()]
        except (OSError, tarfile.TarError) as error:
            raise DataError(
                f"ImageNet: '{where}' is not a readable tar file: {error}. {_STEPS}"
            ) from error
    else:
        names = [str(p.relative_to(where)) for p in where.glob("*/*")]
    images = [n for n in names if n.lower().endswith(_SUFFIXES) and len(Path(n).parts) >= 2]
    classes = sorted({Path(n).parts[-2] for n in images})
    numbered = all(c.isdecimal() for c in classes)
    index = {c: int(c) if numbered else i for i, c in enumerate(classes)}
    return sorted(
        ((n, index[Path(n).parts[-2]]) for n in images), key=lambda entry: (entry[1], entry[0])
    )


class _Reader:
    """Read files by name, from a folder or from a tar that stays open for the pass."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.tar = tarfile.open(source) if source.is_file() else None  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tar is not None:
            self.tar.close()

    def __call__(self, name: str) -> bytes:
        if self.tar is None:
            return (self.source / name).read_bytes()
        file = self.tar.extractfile(name)
        assert file is not None  # only plain files were listed
        return file.read()
