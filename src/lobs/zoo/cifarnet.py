"""CIFAR-Net: three convolutions and two fully-connected layers, batch norms and dropout.

The paper gives no widths. The filters are those of Caffe's cifar10_quick: 32, 32 and 64 of 5×5, and
64 units between the two fully-connected layers. The paper calls its network a revised AlexNet.
AlexNet has 96 % of its weights in fully-connected layers. With 1,024 units it is 93 % here.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class CifarNet(nn.Sequential):
    """CIFAR-Net, 3×32×32 → 10. With 64 units it has 145,578 weights and biases.

    Its batch norms have 384 more parameters.
    """

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
