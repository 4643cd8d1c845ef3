"""Measure how much damping few samples need.

    python -m benchmarks.few_samples [--images 100,300,1000,3000] [--kept 0.1] [--network]

Layers are calibrated on a few images and judged on ten thousand others. Three dampings are compared
by relative error on the other images: the least that makes Ψ invertible, the rule of
`lobs.solvers.metric.few_samples`, and the best of seven steps. The best is chosen on the other
images. `--network` also prunes and tests whole networks.
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import replace
from unittest.mock import patch

import lobs
from lobs import Problem, collect_moments, solve, zoo
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers
from lobs.solvers import metric
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate

LAYERS = (("lenet300", "fc1"), ("lenet300", "fc2"), ("lenet5", "fc1"), ("lenet5", "conv2"))
STEPS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
OTHERS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", default="100,300,1000,3000")
    parser.add_argument("--kept", type=float, default=0.1)
    parser.add_argument("--network", action="store_true")
    chosen = parser.parse_args()
    counts = [int(n) for n in chosen.images.split(",")]
    warnings.simplefilter("ignore", lobs.NumericalWarning)
    layers(counts, 1 - chosen.kept)
    if chosen.network:
        for name in ("lenet300", "lenet5"):
            network(name, counts, 1 - chosen.kept)


def layers(counts: list[int], removed: float) -> None:
    print("layer          columns images vectors    least  by rule  share     best  share")
    train = mnist.load("train")
    ratios = []
    for network_name, name in LAYERS:
        model = zoo.trained(network_name)
        (layer,) = find_layers(model, [name])
        dense = layer.matrix()
        others = train.batches(1000)[-OTHERS // 1000 :]
        judge = layer_problem(layer, dense, collect_moments(model, others, [layer])[name])

        def error(problem: Problem, judge: Problem = judge) -> float:
            return (
                judge.error_of(solve(problem, "auto", lobs.Sparsity(removed)).weight) / judge.energy
            )

        for images in counts:
            moments = collect_moments(model, train.batches(images, images), [layer])[name]
            problem = layer_problem(layer, dense, moments)
            size = float(problem.moment.diagonal(dim1=-2, dim2=-1).mean())
            least, by_rule = error(replace(problem, samples=None)), error(problem)
            best, step = min((error(replace(problem, damping=step * size)), step) for step in STEPS)
            share = metric.few_samples(problem.weight.shape[-1], moments.count)
            ratios.append((by_rule / least, by_rule / best))
            line = f"{network_name + ' ' + name:14} {layer.columns:7} {images:6} {moments.count:7}"
            print(
                f"{line} {least:8.4f} {by_rule:8.4f} {share:6.3f} {best:8.4f} {step:6.0e}",
                flush=True,
            )
    to_least, to_best = (
        math.exp(sum(map(math.log, some)) / len(some)) for some in zip(*ratios, strict=True)
    )
    print(
        f"by rule, geometric means: {to_least:.2f} of the least, at worst {max(ratios)[0]:.2f}; "
        f"{to_best:.2f} of the best's"
    )


def network(name: str, counts: list[int], removed: float) -> None:
    model, train = zoo.trained(name), mnist.load("train")
    test = mnist.load("test").batches(1000)
    print(
        f"\n{name}: test error {error_rate(model, test):.2f} dense, with {1 - removed:.0%} kept by "
        "the defaults"
    )
    for images in counts:
        batches = train.batches(images, images)
        by_rule = error_rate(
            lobs.prune(model, batches, keep=1 - removed, progress=False).model, test
        )
        with patch("lobs.solvers.metric.few_samples", lambda *_: 0.0):
            least = error_rate(
                lobs.prune(model, batches, keep=1 - removed, progress=False).model, test
            )
        print(
            f"  {images:5} images: {least:.2f} with the least damping, {by_rule:.2f} by rule",
            flush=True,
        )


if __name__ == "__main__":
    main()
