"""Same Ψ, same weights, same count: `auto` against ADMM with conjugate gradients and the shared-column-order sweep.

python -m benchmarks.rivals [--sparsity 0.5 0.7 0.9 0.95] [--layers DIR] [--start 0.1 0.03]

Layers: all of LeNet-300-100 and LeNet-5, and every DIR/*.safetensors with tensors `weight` (rows, d) and `moment` (d, d)
(`python -m benchmarks.layer_files` writes them for ResNet-50). ADMM is run from each of the given first penalties (0.1 is the
published one) and its better error counts; its time is that of the published one.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.baselines.admm import admm
from lobs import SOLVERS, Auto, NumericalWarning, Problem, collect, solve, zoo
from lobs.data import mnist
from lobs.layers import find_layers


def problems(folder: Path | None) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    batches = mnist.load("train").batches(500, 20_000)
    for name in ("lenet300", "lenet5"):
        model = zoo.trained(name)
        calibration = collect(model, batches)
        for layer in find_layers(model):
            yield f"{name} {layer.name}", layer.matrix()[0], calibration[layer.name].moment[0], layer.bias is not None
    for file in sorted(folder.glob("*.safetensors")) if folder else []:
        tensors = load_file(str(file))
        weight, moment = tensors["weight"], tensors["moment"]
        # A constant input is a bias column: its moment with itself is 1.
        yield file.stem, weight, moment, bool(abs(float(moment[-1, -1]) - 1) < 1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.7, 0.9, 0.95])
    parser.add_argument("--start", type=float, nargs="*", default=[0.1, 0.03])
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    auto = SOLVERS["auto"]
    assert isinstance(auto, Auto)
    solve(Problem(torch.randn(40, 80), torch.eye(80)), auto, 0.5)  # compile first
    print("| layer | rows×columns | sparsity | start | auto : ADMM published | : ADMM best | seconds auto | ADMM |")
    print("|---|---|---|---|---|---|---|---|")
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for name, weight, moment, bias in problems(given.layers):
        if given.only not in name:
            continue
        for sparsity in given.sparsity:
            rivals, seconds = [], []
            problem = Problem(weight, moment, bias_column=bias, name=name)
            for start in given.start:
                began = time.perf_counter()
                found = admm(weight, moment, sparsity, protected=int(bias), start=start)
                seconds.append(time.perf_counter() - began)
                rivals.append(problem.error_of(found))
            began = time.perf_counter()
            ours = solve(problem, auto, sparsity)
            took = time.perf_counter() - began
            shape = f"{weight.shape[0]}×{weight.shape[1]}"
            start_name = type(auto.start(problem)).__name__
            ratios[weight.shape[1] > 1025].append(ours.error / rivals[0])
            print(
                f"| {name} | {shape} | {sparsity:.0%} | {start_name} | {ours.error / rivals[0]:.3f} "
                f"| {ours.error / min(rivals):.3f} | {took:.2f} | {seconds[0]:.2f} |",
                flush=True,
            )
    for wide, values in ratios.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(f"\n{'over' if wide else 'up to'} 1,024 columns: geometric mean {mean:.3f}, largest {max(values):.3f}")


if __name__ == "__main__":
    main()
