"""Networks that ship with `lobs`: how to build, train and load each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from torch import nn

from lobs.errors import DataError, FileError
from lobs.storage import checkpoint
from lobs.zoo.cifarnet import CifarNet
from lobs.zoo.classics import VGG16, AlexNet
from lobs.zoo.datasets import folders
from lobs.zoo.lenet import LeNet5, LeNet300
from lobs.zoo.resnet import ResNet50
from lobs.zoo.training import Recipe


@dataclass(frozen=True)
class Entry:
    """One network of the zoo.

    Args:
        build: makes the untrained network.
        recipe: how it is trained; None for networks whose weights come from a file.
        paper_kept: the fractions that the paper keeps, by layer name or glob.
        title: the name that people read.
        data: the data set.
        source: how to make `<name>.safetensors` for the data folder.
    """

    build: Callable[[], nn.Module]
    recipe: Recipe | None
    paper_kept: dict[str, float]
    title: str
    data: str = "mnist"
    source: str = ""


def _torchvision(builder: str) -> str:
    return (
        "With torchvision on a machine that reaches its weights: "
        f"`safetensors.torch.save_file(torchvision.models.{builder}"
        f'(weights="IMAGENET1K_V1").state_dict(), "{builder}.safetensors")`.'
    )


ZOO: dict[str, Entry] = {
    "lenet300": Entry(
        build=LeNet300,
        recipe=Recipe(
            epochs=12, learning_rate=0.05, batch_size=64, weight_decay=5e-4, input_dropout=0.2
        ),
        paper_kept={"fc1": 0.067, "fc2": 0.20, "fc3": 0.65},
        title="LeNet-300-100",
    ),
    "lenet5": Entry(
        build=LeNet5,
        recipe=Recipe(epochs=6, learning_rate=0.05, batch_size=128, weight_decay=5e-4),
        paper_kept={"conv1": 0.54, "conv2": 0.43, "fc1": 0.06, "fc2": 0.25},
        title="LeNet-5",
    ),
    "cifarnet": Entry(
        build=CifarNet,
        recipe=Recipe(
            epochs=30, learning_rate=0.1, batch_size=256, weight_decay=5e-4, warm_up=3, augment=True
        ),
        paper_kept={"*": 0.09},
        title="CIFAR-Net",
        data="cifar10",
        source="`lobs train cifarnet` makes it, from CIFAR-10.",
    ),
    "cifarnet-wide": Entry(
        build=partial(CifarNet, units=1024),
        recipe=Recipe(
            epochs=15, learning_rate=0.1, batch_size=256, weight_decay=5e-4, warm_up=2, augment=True
        ),
        # What Han et al. (2015) keep of AlexNet's first and later convolutions and last layer; fc1
        # takes what is left of 9 %.
        paper_kept={"conv1": 0.84, "conv2": 0.38, "conv3": 0.35, "fc1": 0.0669, "fc2": 0.25},
        title="CIFAR-Net with AlexNet's proportions",
        data="cifar10",
        source="`lobs train cifarnet-wide` makes it, from CIFAR-10.",
    ),
    "alexnet": Entry(AlexNet, None, {"*": 0.11}, "AlexNet", "imagenet", _torchvision("alexnet")),
    "vgg16": Entry(VGG16, None, {"*": 0.075}, "VGG-16", "imagenet", _torchvision("vgg16")),
    "resnet50": Entry(
        ResNet50, None, {"*": 0.45}, "ResNet-50", "imagenet", _torchvision("resnet50")
    ),
    "resnet50-v1": Entry(
        build=partial(ResNet50, form="v1", eps=1e-3),
        recipe=None,
        paper_kept={"*": 0.45},
        title="ResNet-50 v1",
        data="imagenet-caffe",
        source="Take Keras's weights (stride in the first 1×1) with torchvision's names.",
    ),
}


def entry(name: str) -> Entry:
    """Return the entry of a network; an unknown name is answered with the known ones."""
    if name not in ZOO:
        raise FileError(f"there is no network '{name}' in the zoo. There are: {', '.join(ZOO)}.")
    return ZOO[name]


def fresh(name: str, seed: int = 0) -> nn.Module:
    """Return an untrained network, initialised from a seed; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return entry(name).build()


def shipped(name: str) -> Path:
    """Return the checkpoint that comes with the package."""
    path = Path(str(resources.files("lobs.zoo") / "checkpoints" / f"{name}.safetensors"))
    if not path.is_file():
        raise FileError(
            f"the checkpoint of '{name}' is missing from the installed package. Reinstall lobs."
        )
    return path


def weights(name: str) -> Path:
    """Return where a network's weights are: in the package, or in the folder of LOBS_DATA."""
    try:
        return shipped(name)
    except FileError:
        if not entry(name).source:
            raise
    try:
        return folders.find(
            [f"{name}.safetensors", f"{name}-imagenet.safetensors"], None, what="", steps=""
        )
    except DataError:
        raise FileError(
            f"the weights of {entry(name).title} do not come with lobs. Put '{name}.safetensors' "
            "into a folder and name that "
            f"folder with --data or LOBS_DATA, or give the file itself. {entry(name).source}"
        ) from None


def trained(name: str, path: str | Path | None = None) -> nn.Module:
    """Return the trained network, with the weights of a file if one is given."""
    source = weights(name) if path is None else Path(path)
    model = fresh(name)
    try:
        model.load_state_dict(checkpoint.load(source).state_dict)
    except RuntimeError as error:
        raise FileError(
            f"'{source}' does not fit {entry(name).title}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()
