"""Measure the test error of pruned LeNets, without retraining.

    python -m benchmarks.lenet_accuracy [--network lenet300] [--checkpoint FILE]
        [--solvers greedy lobs magnitude] [--kept 8.4 3]

First every solver at the paper's ratio per layer, then budgets for the whole network.
"""

from __future__ import annotations

import argparse
import itertools
import warnings

from lobs import SOLVERS, NumericalWarning, Sparsity, prune, zoo
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--network", choices=["lenet300", "lenet5"], nargs="*", default=["lenet300", "lenet5"]
    )
    parser.add_argument("--checkpoint", help="other weights for the network")
    parser.add_argument("--solvers", nargs="*", default=list(SOLVERS))
    parser.add_argument(
        "--kept",
        type=float,
        nargs="*",
        default=[8.4, 3.0, 1.5, 0.9],
        help="whole-network budgets, in %%",
    )
    parser.add_argument(
        "--inputs",
        nargs="*",
        default=["asymmetric"],
        help="for the budgets: asymmetric, pruned, dense",
    )
    parser.add_argument(
        "--refit",
        nargs="*",
        default=["layers", "default"],
        help="for the budgets: layers, network, default",
    )
    parser.add_argument(
        "--samples", type=int, help="number of calibration images; all 60,000 by default"
    )
    given = parser.parse_args()
    # MNIST's border pixels are dead: Ψ of the first layer is singular.
    warnings.simplefilter("ignore", NumericalWarning)
    train, test = mnist.load("train").batches(500, given.samples), mnist.load("test").batches()
    for name in given.network:
        entry, model = zoo.entry(name), zoo.trained(name, given.checkpoint)
        target = Sparsity({layer: 1 - kept for layer, kept in entry.paper_kept.items()})
        ratios = "/".join(f"{100 * kept:g}" for kept in entry.paper_kept.values())
        print(
            f"\n{entry.title}, dense test error {error_rate(model, test):.2f} %, kept {ratios} % "
            "by layer\n"
        )
        print(
            "| solver | inputs | kept | test error (%) | layer errors E | bound | measured | "
            "seconds |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for solver in given.solvers:
            for inputs in ("dense", "pruned") if solver == "greedy" else ("dense",):
                result = prune(model, train, target, solver=solver, inputs=inputs)
                errors = " / ".join(f"{row.error:.3g}" for row in result.layers)
                certificate = result.certificate
                print(
                    f"| {solver} | {inputs} | {result.kept_fraction:.2%} | "
                    f"{error_rate(result.model, test):.2f} "
                    f"| {errors} | {certificate.bound:.4g} | {certificate.measured:.3g} | "
                    f"{result.seconds:.1f} |",
                    flush=True,
                )
        if given.kept:
            print(
                "\n| kept in all | inputs | refit | kept by layer (%) | test error (%) | "
                "bound | measured | seconds |"
            )
            print("|---|---|---|---|---|---|---|---|")
        for kept, inputs, how in itertools.product(given.kept, given.inputs, given.refit):
            refit = None if how == "default" else how
            result = prune(model, train, Sparsity(1 - kept / 100), inputs=inputs, refit=refit)
            shares = " / ".join(f"{100 * row.kept_fraction:.3g}" for row in result.layers)
            certificate = result.certificate
            print(
                f"| {kept:g} % | {inputs} | {how} | {shares} | "
                f"{error_rate(result.model, test):.2f} | {certificate.bound:.4g} "
                f"| {certificate.measured:.3g} | {result.seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
