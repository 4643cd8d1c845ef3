"""ResNet-50 (He et al. 2016), with torchvision's parameter names; 25,557,032 parameters.

Two forms go by the name. In the original, "v1", a block that halves the image does so in its first
1×1 convolution; in torchvision's ("v1.5") in its 3×3. Weights fit both, but compute the right thing
only in the one they were trained in.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Form = Literal["v1", "v1.5"]


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, added to the input."""

    def __init__(self, inputs: int, width: int, stride: int, form: Form, eps: float) -> None:
        super().__init__()
        first, second = (stride, 1) if form == "v1" else (1, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(width, eps)
        self.conv2 = nn.Conv2d(width, width, 3, second, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, eps)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width, eps)
        self.relu = nn.ReLU()
        self.downsample: nn.Sequential | None = None
        if stride > 1 or inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width, eps))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, through ReLU."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        way: Tensor = x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(self.bn3(self.conv3(out)) + way)
        return added


class ResNet50(nn.Module):
    """Sixteen bottlenecks in four groups between a 7×7 convolution and one fully-connected layer.

    `form` says where blocks halve the image, `eps` is that of batch normalisation; (`v1`, 1e-3) are
    the original's in Keras.
    """

    def __init__(self, classes: int = 1000, *, form: Form = "v1.5", eps: float = 1e-5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, eps)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for index, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
            row = []
            for block in range(blocks):
                row.append(
                    Bottleneck(channels, width, 2 if block == 0 and index > 1 else 1, form, eps)
                )
                channels = 4 * width
            self.add_module(f"layer{index}", nn.Sequential(*row))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(1, 5):
            x = self.get_submodule(f"layer{index}")(x)
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out
