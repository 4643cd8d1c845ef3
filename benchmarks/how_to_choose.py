"""Compare budgets, solvers and inputs on LeNet-300-100 at falling sizes.

    python -m benchmarks.how_to_choose [--samples 10000] [--picture docs/how-to-choose.png]

Nothing is retrained. Prints a table and draws a picture.
"""

from __future__ import annotations

import argparse
import warnings

from lobs import NumericalWarning, Sparsity, prune, zoo
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate

KEPT = (20.0, 10.0, 5.0, 3.0, 2.0, 1.5)
CHOICES = {
    "magnitude, same share of every layer": ("magnitude", "layer", "dense", "layers"),
    "greedy, same share of every layer": ("greedy", "layer", "dense", "layers"),
    "greedy, one budget": ("greedy", "network", "dense", "layers"),
    "auto, one budget": ("auto", "network", "dense", "layers"),
    "auto, one budget, pruned inputs": ("auto", "network", "pruned", "layers"),
    "auto, one budget, asymmetric inputs": ("auto", "network", "asymmetric", "layers"),
    "the same, then a joint refit (default)": ("auto", "network", "asymmetric", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--picture")
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    train, test = mnist.load("train").batches(500, given.samples), mnist.load("test").batches()
    model = zoo.trained("lenet300")
    dense = error_rate(model, test)
    print(
        f"LeNet-300-100, dense {dense:.2f} %, {given.samples:,} images; test error (%) by share "
        "kept\n"
    )
    print("| choice |", " | ".join(f"{kept:g} %" for kept in KEPT), "|\n|---|" + "---|" * len(KEPT))
    curves: dict[str, list[float]] = {}
    for name, (solver, scope, inputs, refit) in CHOICES.items():
        targets = [Sparsity(1 - kept / 100, scope=scope) for kept in KEPT]
        options = {"solver": solver, "inputs": inputs, "refit": refit}
        curves[name] = [error_rate(prune(model, train, t, **options).model, test) for t in targets]
        print(f"| {name} |", " | ".join(f"{value:.2f}" for value in curves[name]), "|", flush=True)
    if given.picture:
        draw(curves, dense, given.picture)


def draw(curves: dict[str, list[float]], dense: float, path: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10.5, 5), layout="constrained")
    for name, values in curves.items():
        axes.plot(KEPT, values, "o-", label=name)
    axes.axhline(dense, color="grey", linestyle=":", label=f"dense, {dense:.2f} %")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="weights kept (%)",
        ylabel="test error (%)",
        title="LeNet-300-100, no retraining",
    )
    axes.set_xticks(KEPT, [f"{kept:g}" for kept in KEPT])
    axes.set_yticks([1.5, 2, 3, 5, 10, 20, 50, 90], ["1.5", "2", "3", "5", "10", "20", "50", "90"])
    axes.minorticks_off()
    axes.invert_xaxis()
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
