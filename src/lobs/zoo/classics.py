"""AlexNet and VGG-16, with torchvision's parameter names, so that its weights load.

AlexNet is Krizhevsky's one-column form (2014): 61,100,840 parameters. VGG-16 is configuration D of
Simonyan and Zisserman (2014): 138,357,544 parameters. Both take 224×224 images scaled as
`lobs.zoo.datasets.imagenet` does for torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_VGG16 = (
    64,
    64,
    0,
    128,
    128,
    0,
    256,
    256,
    256,
    0,
    512,
    512,
    512,
    0,
    512,
    512,
    512,
    0,
)  # widths; 0 is a pooling


class _Classic(nn.Module):
    def __init__(self, features: nn.Sequential, pool: int, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return out


class AlexNet(_Classic):
    """Five convolutions, three fully-connected layers."""

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU()),
            nn.Linear(4096, classes),
        )
        super().__init__(features, 6, classifier)


class VGG16(_Classic):
    """Thirteen convolutions of 3×3, three fully-connected layers, the first with 25,088 inputs."""

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        steps: list[nn.Module] = []
        channels = 3
        for width in _VGG16:
            if width:
                steps += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            else:
                steps.append(nn.MaxPool2d(2))
        classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(4096, classes),
        )
        super().__init__(nn.Sequential(*steps), 7, classifier)
