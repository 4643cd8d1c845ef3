"""Prune to 2:4 sparsity, the pattern of sparse tensor cores: two of every four weights go.

python examples/two_four.py
"""

from __future__ import annotations

import torch

import lobs
from lobs import zoo
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate


def main() -> None:
    """Prune to 2:4 with and without compensation, check the pattern, convert it for the device."""
    train, test = mnist.load("train"), mnist.load("test").batches()
    model = zoo.trained("lenet300")
    target = lobs.NByM({"fc1": 2, "fc2": 2}, 4)  # the small last layer stays dense
    result = lobs.prune(model, train.batches(limit=2000), target, progress=False)
    plain = lobs.prune(
        model, train.batches(limit=2000), target, solver="magnitude", inputs="dense", progress=False
    )

    dense, ours, naive = (error_rate(net, test) for net in (model, result.model, plain.model))
    print(f"test error {dense:.2f} % dense, {ours:.2f} % at 2:4, {naive:.2f} % at 2:4 by magnitude")
    moved, naively = result.certificate.measured, plain.certificate.measured
    assert moved is not None and naively is not None
    assert moved < naively
    assert ours < dense + 0.3

    try:
        _, converted = lobs.deploy.to_semi_structured(
            result.model.half() if torch.cuda.is_available() else result.model
        )
        print(f"semi-structured now: {', '.join(converted)}")
    except lobs.LobsError as why:
        print(f"not converted here: {why}")

    for name in ("fc1.weight", "fc2.weight"):
        kept = result.masks[name].view(-1, 4).sum(dim=1)
        assert bool((kept == 2).all()), f"{name} is not 2:4"
        assert int((result.model.state_dict()[name].view(-1, 4) != 0).sum(dim=1).max()) <= 2


if __name__ == "__main__":
    main()
