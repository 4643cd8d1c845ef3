"""Measure what `Budget(drop=…)` without labels keeps, and what accuracy it really costs.

    python -m benchmarks.drop [--networks lenet300 lenet5 cifarnet] [--drop 0.005]
        [--checkpoint cifarnet=FILE] [--images N] [--points 16] [--ratio 1.07]

Training images without labels choose the network. Test images only judge it. A fine sweep then
prunes to sizes around it, on all images. "Smallest" is the smallest size of the sweep whose loss of
test accuracy is within the drop. CIFAR-Net's weights come from `lobs train cifarnet`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

from torch import nn

import lobs
from lobs import NumericalWarning, zoo
from lobs.pruning.sweep import SweepPoint, sweep
from lobs.zoo.datasets import cifar10, mnist
from lobs.zoo.training import error_rate

_ABOVE = 3  # sizes of the sweep that are larger than the network that was chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", default=["lenet300", "lenet5", "cifarnet"])
    parser.add_argument("--drop", type=float, default=0.005)
    parser.add_argument("--checkpoint", nargs="*", default=[], help="network=file")
    parser.add_argument("--images", type=int, help="training images; all by default")
    parser.add_argument("--points", type=int, default=16, help="sizes of the sweep")
    parser.add_argument("--ratio", type=float, default=1.07, help="between two sizes")
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    files = dict(pair.split("=", 1) for pair in given.checkpoint)
    print("| network | kept | trials | answers that change | dense | loss | smallest | ratio | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.networks:
        print(row(name, files.get(name), given), flush=True)


def row(name: str, file: str | None, given: argparse.Namespace) -> str:
    """Return one network's line of the table."""
    model, data = zoo.trained(name, file), mnist if zoo.entry(name).data == "mnist" else cifar10
    train = [x for x, _ in data.load("train").batches(500, given.images)]
    test = data.load("test").batches(1000)
    dense, began = accuracy(model, test), time.perf_counter()
    result = lobs.prune(model, train, lobs.Budget(drop=given.drop), progress=False)
    seconds, loss = time.perf_counter() - began, dense - accuracy(result.model, test)
    points = sizes(model, train, test, result.kept_fraction, given)
    holding = [p.kept_fraction for p in points if dense - p.score <= given.drop]
    smallest = min(holding, default=1.0)
    limit = result.certificate.changes_at_most
    certified = "–" if limit is None else f"≤ {limit:.2%}"
    return (
        f"| {zoo.entry(name).title} | {result.kept_fraction:.2%} | "
        f"{len(result.settings['trials'])} | {certified} | {dense:.2%} | {loss:.2%} | "
        f"{smallest:.2%} | {result.kept_fraction / smallest:.2f} | {seconds:.0f} |"
    )


def accuracy(model: nn.Module, test: Any) -> float:
    """Return the share of right answers."""
    return 1 - error_rate(model, test) / 100


def sizes(
    model: nn.Module, train: list[Any], test: Any, kept: float, given: argparse.Namespace
) -> list[SweepPoint]:
    """Return the sweep around a size, as `prune` does it with defaults.

    Args:
        model: the dense network.
        train: images without labels.
        test: labelled batches that judge.
        kept: the fraction that the search chose.
        given: the options.
    """
    values = [min(1.0, kept * given.ratio ** (_ABOVE - i)) for i in range(given.points)]
    return sweep(model, train, lambda m: accuracy(m, test), sorted(set(values)), progress=False)


if __name__ == "__main__":
    main()
