"""Train a network of your own, prune it, and get a small file that runs faster.

python examples/own_cnn.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.zoo.datasets import mnist


class Net(nn.Module):
    """Any module with Linear or Conv2d layers will do. It needs nothing from lobs."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to scores."""
        return self.classifier(self.features(x).flatten(1))


def error(model: nn.Module) -> float:
    """Return the per cent of the first 2,000 test images that are misclassified."""
    test = mnist.load("test")
    with torch.no_grad():
        return 100 * float(
            (model(test.images[:2000]).argmax(1) != test.labels[:2000]).float().mean()
        )


def train(model: nn.Module, steps: int) -> None:
    """Train briefly, enough for a network that is worth pruning."""
    data = mnist.load("train")
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        part = slice(step * 64 % 48_000, step * 64 % 48_000 + 64)
        loss = F.cross_entropy(model(data.images[part]), data.labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Train, prune, export, load, accelerate."""
    torch.manual_seed(0)
    model = Net()
    train(model, steps=300)
    model.eval()

    calibration = [mnist.load("train").images[i : i + 250] for i in range(0, 1000, 250)]
    result = lobs.prune(model, calibration, keep=0.1, progress=False)
    print(result.summary())

    with tempfile.TemporaryDirectory() as folder:
        file = result.export(Path(folder) / "net.safetensors")  # compact: the zeros take no room
        print(f"dense weights {file.dense_bytes:,} bytes, compact file {file.file_bytes:,} bytes")
        again = Net()
        again.load_state_dict(lobs.load(file.path).state_dict)

    began = time.perf_counter()
    fast = lobs.accelerate(again, mnist.load("test").images[:64], seconds=0.2, progress=False)
    print(fast.summary(), f"\nmeasured in {time.perf_counter() - began:.1f} s")

    before, after = error(model), error(fast.model)
    print(f"test error {before:.2f} % before, {after:.2f} % with a tenth of the weights")
    assert after < before + 1.0
    assert file.file_bytes < 0.2 * file.dense_bytes
    assert fast.speedup.low >= 1.0


if __name__ == "__main__":
    main()
