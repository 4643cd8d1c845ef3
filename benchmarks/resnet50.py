"""Prune ResNet-50 as a user calls it, and count right answers on other images.

    python -m benchmarks.resnet50 WEIGHTS TRAIN VALIDATION [--keep 0.5 0.25] [--images 1000]
        [--refit default layers dense] [--judges 3000]

WEIGHTS is the safetensors file of `resnet50-v1`. TRAIN and VALIDATION are tars or folders of class
folders. "default" is `lobs.prune(net, images, keep=…)`. "layers" is the same without a refit by
blocks. "dense" solves every layer on the dense network's inputs. A fall's standard error is that of
paired answers.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lobs
from lobs import zoo
from lobs.zoo.datasets import imagenet

HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "layers": {"refit": "layers"},
    "dense": {"inputs": "dense"},
}


@torch.no_grad()
def right(model: nn.Module, images: imagenet.ImageNet) -> list[bool]:
    """Return for every image whether the network's first answer is right."""
    model = copy.deepcopy(model).eval().to(memory_format=torch.channels_last)  # the faster layout
    return [bool(answer) for x, y in images for answer in (model(x).argmax(dim=1) == y)]


def asked(
    description: str | None, keep: list[float], images: int, judges: int
) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: what `--help` says.
        keep: the budgets by default.
        images: number of calibration images by default.
        judges: number of judging images by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("--keep", type=float, nargs="*", default=keep)
    parser.add_argument("--images", type=int, default=images)
    parser.add_argument("--judges", type=int, default=judges)
    parser.add_argument("--refit", nargs="*", choices=HOW, default=["default"])
    warnings.simplefilter("ignore")
    return parser.parse_args()


def loaded(given: argparse.Namespace, scaling: Any) -> tuple[imagenet.ImageNet, imagenet.ImageNet]:
    """Return the images that calibrate and those that judge."""
    return (
        imagenet.load("train", given.train, scaling=scaling, batch_size=25, limit=given.images),
        imagenet.load("val", given.validation, scaling=scaling, batch_size=25, limit=given.judges),
    )


def main() -> None:
    given = asked(__doc__, [0.5, 0.3, 0.25, 0.1], images=1000, judges=3000)
    model = zoo.trained("resnet50-v1", given.weights).eval()
    compare(model, *loaded(given, "caffe"), given.keep, given.refit)


def compare(
    model: nn.Module,
    images: imagenet.ImageNet,
    judges: imagenet.ImageNet,
    budgets: list[float],
    ways: list[str],
) -> None:
    """Print one row for each budget and way.

    Args:
        model: the dense network.
        images: the calibration images.
        judges: images that count right answers.
        budgets: shares of the weights to keep.
        ways: names of ways to prune.
    """
    dense = right(model, judges)
    print(f"dense top-1 {100 * sum(dense) / len(dense):.2f} on {len(dense):,} images\n")
    print("| kept | way | top-1 | fall | ± | seconds | |")
    print("|---|---|---|---|---|---|---|")
    for keep in budgets:
        for way in ways:
            began = time.perf_counter()
            result = lobs.prune(model, images, keep=keep, progress=False, **HOW[way])
            took = time.perf_counter() - began
            found = right(result.model, judges)
            lost = [a - b for a, b in zip(dense, found, strict=True)]
            fall = sum(lost) / len(lost)
            spread = math.sqrt(sum((x - fall) ** 2 for x in lost)) / len(lost)
            spent = {name: round(seconds) for name, seconds in result.phases.items()}
            print(
                f"| {keep:.0%} | {way} | {100 * sum(found) / len(found):.2f} | {100 * fall:.2f} "
                f"| {100 * spread:.2f} | {took:.0f} "
                f"| {spent}; {result.settings.get('refit', '')} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
