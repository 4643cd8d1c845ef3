"""Compare n:m errors with the shared-column-order sweep, layer by layer.

    python -m benchmarks.patterns [--patterns 2:4 4:8] [--layers DIR] [--only GLOB]
        [--images 10000]

Weights and Ψ are the same for both. Layers are those of the shipped LeNets on MNIST, without bias.
Further layers come from DIR/{name}.safetensors with tensors `weight` [rows, d] and `moment` [d, d].
The sweep gets its best damping of five per layer. Its seconds are those of one run.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines.column_sweep import best_column_sweep, column_sweep
from benchmarks.layer_files import read
from lobs import NByM, NumericalWarning, Problem, collect_moments, solve, zoo
from lobs.layers import find_layers
from lobs.zoo.datasets import mnist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", nargs="*", default=["2:4", "4:8"])
    parser.add_argument("--layers", type=Path, help="folder of further layers as safetensors")
    parser.add_argument("--only", default="*", help="glob of layer names")
    parser.add_argument("--images", type=int, default=10_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    solve(
        Problem(torch.randn(2, 8), torch.eye(8)), "greedy", NByM(2, 4)
    )  # compile, or load the compiled code
    print(
        "| layer | shape | pattern | sweep, relative E | ours / sweep | magnitude / sweep | sweep "
        "s | ours s | by |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for pattern in given.patterns:
        n, m = map(int, pattern.split(":"))
        ratios = []
        for name, weight, moment in layers(given.layers, given.images):
            if fnmatchcase(name, given.only):
                ratios.append(compare(name, weight, moment, n, m))
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(
                f"| **{pattern}** | | | | geometric mean **{mean:.3f}**, worst "
                f"**{max(ratios):.3f}** | | | | |",
                flush=True,
            )


def layers(folder: Path | None, images: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    for network in ("lenet300", "lenet5"):
        model = zoo.trained(network)
        moments = collect_moments(model, mnist.load("train").batches(500, images))
        for layer in find_layers(model):
            d = layer.columns
            yield (
                f"{network} {layer.name}",
                layer.matrix()[0, :, :d],
                moments[layer.name].moment[0, :d, :d],
            )
    for path in sorted(folder.glob("*.safetensors")) if folder else []:
        if not path.name.startswith("lenet"):
            weight, moment, _ = read(path)
            yield path.stem, weight.float(), moment.double()


def compare(name: str, weight: Tensor, moment: Tensor, n: int, m: int) -> float:
    problem = Problem(weight, moment, name=name)
    theirs = problem.error_of(best_column_sweep(weight, moment, pattern=(n, m)))
    began = time.perf_counter()
    column_sweep(weight, moment, pattern=(n, m))
    theirs_took = time.perf_counter() - began
    began = time.perf_counter()
    ours = solve(problem, "greedy", NByM(n, m))
    took = time.perf_counter() - began
    crude = solve(problem, "magnitude", NByM(n, m)).error
    rows, d = weight.shape
    print(
        f"| {name} | {rows}×{d} | {n}:{m} | {theirs / problem.energy:.5f} | "
        f"{ours.error / theirs:.3f} | {crude / theirs:.1f} "
        f"| {theirs_took:.2f} | {took:.2f} | {ours.status.removeprefix('ok ').strip('()')} |",
        flush=True,
    )
    return ours.error / theirs


if __name__ == "__main__":
    main()
