"""Retrain in your own loop: any optimiser, any schedule, and the zeros stay zero.

python examples/retrain.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import lobs
from lobs import zoo
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate


def main() -> None:
    """Prune to 1.5 %, retrain with the zeros held, and check them."""
    torch.manual_seed(0)
    train, test = mnist.load("train"), mnist.load("test").batches()
    model = zoo.trained("lenet300")
    pruned = lobs.prune(model, train.batches(limit=2000), keep="1.5%", progress=False)
    net, before = pruned.model, error_rate(pruned.model, test)

    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-2)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98)
    )
    with lobs.hold(net, pruned.masks, optimizer):
        for step in range(600):
            part = slice(step * 100 % 60_000, step * 100 % 60_000 + 100)
            loss = F.cross_entropy(net(train.images[part]), train.labels[part])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(net)

    after = error_rate(average.module, test)
    print(
        f"{pruned.kept_fraction:.1%} of the weights kept: test error {before:.2f} % as pruned, "
        f"{after:.2f} % retrained"
    )
    assert after < before
    for name, mask in pruned.masks.items():
        assert not average.module.get_parameter(name)[~mask].any(), f"{name} lost zeros"


if __name__ == "__main__":
    main()
