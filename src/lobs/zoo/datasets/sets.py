"""Data sets by name: what a zoo network was trained on and is tested on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lobs.errors import DataError
from lobs.zoo.datasets import cifar10, imagenet, mnist
from lobs.zoo.datasets.labelled import Split

NAMES = ("mnist", "cifar10", "imagenet", "imagenet-caffe")


class Batched(Protocol):
    """A data set that can be cut into batches."""

    def batches(
        self, size: int = 500, limit: int | None = None
    ) -> Sequence[tuple[Tensor, Tensor]] | imagenet.ImageNet:
        """Return batches (images, labels) of at most `limit` samples, to be read repeatedly."""
        ...


def load(name: str, split: Split, folder: str | os.PathLike[str] | None = None) -> Batched:
    """Return one split of a data set.

    Args:
        name: one of `NAMES`. "imagenet-caffe" is ImageNet with pixels 0–255 less a mean.
        split: "train" or "test", which is ImageNet's validation set.
        folder: where the data is; LOBS_DATA by default.
    """
    match name:
        case "mnist":
            return mnist.load(split)
        case "cifar10":
            return cifar10.load(split, folder)
        case "imagenet" | "imagenet-caffe":
            scaling: imagenet.Scaling = "caffe" if name.endswith("caffe") else "torchvision"
            return imagenet.load("train" if split == "train" else "val", folder, scaling=scaling)
    raise DataError(f"there is no data set '{name}'. There are: {', '.join(NAMES)}.")
