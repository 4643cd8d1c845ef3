"""The two LeNets of the paper (LeCun et al. 1998, in the sizes that pruning papers use)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class LeNet300(nn.Sequential):
    """LeNet-300-100: 784 → 300 → 100 → 10, ReLU between; 266,610 parameters. Takes images or flat vectors."""

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(784, 300),
                relu1=nn.ReLU(),
                fc2=nn.Linear(300, 100),
                relu2=nn.ReLU(),
                fc3=nn.Linear(100, 10),
            )
        )
        # He's initialisation, wide enough to be seen beside trained weights: pixels that are always
        # black keep it for good, and a method that judges by magnitude alone has to cope with that,
        # as on the networks of the time.
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)


class LeNet5(nn.Sequential):
    """LeNet-5: 20 and 50 filters of 5×5, each followed by ReLU and 2×2 max-pooling, then 500 and 10 units.

    431,080 parameters.
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(20, 50, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(800, 500),
                relu3=nn.ReLU(),
                fc2=nn.Linear(500, 10),
            )
        )
