"""CIFAR-Net: three convolutions and two fully-connected layers, with batch normalisation and dropout.

The paper gives no widths. The filters are those of Caffe's cifar10_quick, 32, 32 and 64 of 5×5, and
so are the 64 units between the two fully-connected layers. But the paper calls its network a
revised AlexNet, and that has 96 % of its weights in its fully-connected layers: 1,024 units make it
93 % here.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class CifarNet(nn.Sequential):
    """3×32×32 → 10; with 64 units 145,578 weights and biases, and 384 numbers of batch normalisation."""

    def __init__(self, units: int = 64, dropout: float = 0.1) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(3, 32, 5, padding=2),
                norm1=nn.BatchNorm2d(32),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(3, 2, padding=1),
                conv2=nn.Conv2d(32, 32, 5, padding=2),
                norm2=nn.BatchNorm2d(32),
                relu2=nn.ReLU(),
                pool2=nn.AvgPool2d(2),
                conv3=nn.Conv2d(32, 64, 5, padding=2),
                norm3=nn.BatchNorm2d(64),
                relu3=nn.ReLU(),
                pool3=nn.AvgPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(1024, units),
                norm4=nn.BatchNorm1d(units),
                relu4=nn.ReLU(),
                dropout=nn.Dropout(dropout),
                fc2=nn.Linear(units, 10),
            )
        )
