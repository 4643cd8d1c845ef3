"""Measure how often the 95 % guarantee holds, and how wide it is, on MNIST's test images.

    python -m benchmarks.guarantee_coverage [--splits 500] [--samples 1000] [--images 4000]

LeNet-5 is pruned to several sizes once. Its 10,000 test images are all inputs there are, so the
share of answers that change is known exactly. Every split draws some of them. First the guarantee
is computed for three sizes. Then every split searches for the smallest size within a drop, as
`Budget(drop=…)` does, on three quarters of its inputs, and certifies on the rest.
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lobs import NumericalWarning, zoo
from lobs.calibration.forward import evaluating
from lobs.certificate.guarantee import CONFIDENCE, Tally
from lobs.pruning.drop_search import TRIALS
from lobs.pruning.sweep import sweep_by_layer
from lobs.zoo.datasets import mnist

KEPT = (0.3, 0.25, 0.2, 0.17, 0.15, 0.13, 0.115, 0.1, 0.09, 0.08, 0.07, 0.06)
SHOWN = (0.2, 0.1, 0.07)
DROPS = (0.01, 0.02)
_QUANTILE = 1.6449  # of the normal distribution, at 95 %


@dataclass(frozen=True)
class Answers:
    """The outputs of one network for all test images, and what a tally says of all of them."""

    outputs: Tensor
    whole: Tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000, help="inputs of a split")
    parser.add_argument("--images", type=int, default=4000, help="images that prune")
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    dense, found = networks(given.images)
    slack = 2 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / given.splits)
    print(
        f"{given.splits} splits of {given.samples:,} inputs; binomial error ±{100 * slack:.1f} %\n"
    )
    print("| kept | answers that change | covered | mean limit | width, of the optimum |")
    print("|---|---|---|---|---|")
    for kept in SHOWN:
        print(coverage(dense, found[kept], kept, given), flush=True)
    print("\n| drop | drop held | changes covered | mean kept | true mean drop |")
    print("|---|---|---|---|---|")
    for drop in DROPS:
        print(searched(dense, found, drop, given), flush=True)


def networks(images: int) -> tuple[Tensor, dict[float, Answers]]:
    """Return the dense network's outputs for the test images, and those of every size."""
    model, test = zoo.trained("lenet5"), [x for x, _ in mnist.load("test").batches(1000)]
    dense, outputs = _outputs(model, test), []

    def evaluate(pruned: nn.Module) -> float:
        outputs.append(_outputs(pruned, test))
        return float((outputs[-1].argmax(1) == dense.argmax(1)).double().mean())

    train = mnist.load("train").batches(500, images)
    sweep_by_layer(model, train, evaluate, KEPT, solver="greedy", progress=False)
    everything = torch.arange(len(dense))
    return dense, {
        kept: Answers(own, tallied(dense, own, everything))
        for kept, own in zip(KEPT, outputs, strict=True)
    }


def _outputs(model: nn.Module, batches: list[Tensor]) -> Tensor:
    with evaluating(model):
        return torch.cat([model(x) for x in batches])


def tallied(dense: Tensor, pruned: Tensor, rows: Tensor) -> Tally:
    """Return the sums over some images, as `prune` takes them."""
    tally = Tally()
    tally.add(rows, dense[rows], pruned[rows])
    return tally


def coverage(dense: Tensor, found: Answers, kept: float, given: argparse.Namespace) -> str:
    """Return a row: how often the limit is not below the truth, and its width."""
    truth, n = found.whole.changed / len(dense), given.samples
    generator, held, limits, widths = torch.Generator().manual_seed(0), 0, 0.0, 0.0
    for _ in range(given.splits):
        rows = torch.randint(len(dense), (n,), generator=generator)
        guarantee = tallied(dense, found.outputs, rows).guarantee()
        held += guarantee.at_most >= truth
        limits += guarantee.at_most
        widths += guarantee.at_most - guarantee.changed
    optimum = _QUANTILE * math.sqrt(truth * (1 - truth) / n)
    mean = widths / given.splits
    return (
        f"| {kept:.1%} | {truth:.2%} | {held / given.splits:.1%} | {limits / given.splits:.2%} | "
        f"{mean / optimum:.2f}× |"
    )


def searched(
    dense: Tensor, found: dict[float, Answers], drop: float, given: argparse.Namespace
) -> str:
    """Return a row: how often the drop and the guarantee hold after a search."""
    generator = torch.Generator().manual_seed(1)
    held = covered = given_back = 0
    sizes = drops = 0.0
    for _ in range(given.splits):
        rows = torch.randint(len(dense), (4 * given.samples,), generator=generator)
        choosing, certifying = rows.tensor_split([3 * given.samples])
        kept = search(dense, found, drop, choosing)
        if kept is None:
            given_back += 1
            continue
        own = found[kept]
        truth = own.whole.drop(CONFIDENCE)[0]
        guarantee = tallied(dense, own.outputs, certifying).guarantee()
        held += truth <= drop
        covered += guarantee.at_most >= own.whole.changed / len(dense)
        sizes, drops = sizes + kept, drops + truth
    tried = max(1, given.splits - given_back)
    none = f" ({given_back} searches found none)" if given_back else ""
    return (
        f"| {drop:.1%} | {held / tried:.1%} | {covered / tried:.1%} | {sizes / tried:.1%} | "
        f"{drops / tried:.2%} |{none}"
    )


def search(dense: Tensor, found: dict[float, Answers], drop: float, rows: Tensor) -> float | None:
    """Bisect the sizes for the smallest whose limit on the expected drop is within `drop`."""
    sizes, best, low, high = sorted(found), None, 0, len(found)
    level = 1 - (1 - CONFIDENCE) / TRIALS
    while low < high:
        middle = (low + high) // 2
        _, at_most = tallied(dense, found[sizes[middle]].outputs, rows).drop(level)
        if at_most <= drop:
            best, high = sizes[middle], middle
        else:
            low = middle + 1
    return best


if __name__ == "__main__":
    main()
