"""Compare one-probe Jacobian weights with exact ones, in accuracy and cost.

    python -m benchmarks.influence [--network lenet5] [--samples 5000] [--seeds 5]

The exact weights take one backward pass per output. Cost is counted in forward-backward passes of
the same network over the same inputs, timed in the same run.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from lobs import zoo
from lobs.calibration.output_influence import _probed, output_influence
from lobs.layers import Layer, find_layers
from lobs.zoo.datasets import mnist


def exact(model: nn.Module, batches: list[Tensor], layers: list[Layer]) -> dict[str, Tensor]:
    total = {
        layer.name: torch.zeros(layer.groups, layer.rows, dtype=torch.float64) for layer in layers
    }
    for x in batches:
        with _probed(layers) as probes:
            out = model(x)
        for c in range(out.shape[1]):
            gradients = torch.autograd.grad(
                out[:, c].sum(), [z for _, z in probes], retain_graph=True
            )
            for (layer, _), gradient in zip(probes, gradients, strict=True):
                total[layer.name] += layer.by_unit(gradient.double().square())
    return {name: value / sum(map(len, batches)) for name, value in total.items()}


def plain_pass(model: nn.Module, batches: list[Tensor]) -> float:
    began = time.perf_counter()
    for x in batches:
        model(x).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="lenet5", choices=["lenet300", "lenet5"])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    model = zoo.trained(given.network).eval()
    layers = find_layers(model)
    batches = [
        batch[0] if isinstance(batch, tuple) else batch
        for batch in mnist.load("train").batches(500, given.samples)
    ]
    true = exact(model, batches, layers)
    plain = min(plain_pass(model, batches) for _ in range(3))
    print(
        f"{given.network}, {given.samples} inputs; one forward-backward pass takes {plain:.2f} s\n"
    )
    print(
        "| seed | layer | total deviation over total influence | norms | largest of units with 95 "
        "% of it | passes |"
    )
    print("|---|---|---|---|---|---|")
    for seed in range(given.seeds):
        began = time.perf_counter()
        found = output_influence(model, batches, layers, seed=seed)
        passes = (time.perf_counter() - began) / plain
        for name, value in found.items():
            sure, off = true[name].flatten(), (value - true[name]).flatten()
            share = float(off.abs().sum() / sure.sum())
            # Units that hardly ever answer were seen too seldom to be estimated, and matter as
            # little.
            order = sure.argsort(descending=True)
            heavy = order[: 1 + int((sure[order].cumsum(0) < 0.95 * sure.sum()).sum())]
            largest = float((off[heavy] / sure[heavy]).abs().max())
            print(
                f"| {seed} | {name} | {share:.2%} | {off.norm() / sure.norm():.2%} | {largest:.2%} "
                f"| {passes:.2f} |"
            )


if __name__ == "__main__":
    main()
