"""The two LeNets of the paper (LeCun et al. 1998, in the sizes that pruning papers use)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class LeNet300(nn.Sequential):
    """LeNet-300-100: 784 → 300 → 100 → 10 with ReLU between; 266,610 parameters.

    It takes images or flat vectors.
    """

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
        # He's initialisation, as in networks of the time. Weights of pixels that are always black
        # keep it, and magnitude pruning must cope with them.
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)


class LeNet5(nn.Sequential):
    """LeNet-5: 20 and 50 filters of 5×5, then 500 and 10 units; 431,080 parameters.

    ReLU and 2×2 max-pooling follow each convolution.
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
