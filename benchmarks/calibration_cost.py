"""Compare calibration with a plain forward pass and with bare matrix products.

    python -m benchmarks.calibration_cost [--images 10000]

The network is LeNet-5 on MNIST. The bare products are YᵀY in float32 for each layer. Their operands
have calibration's sizes and row counts. Any implementation without symmetry pays at least that.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.timing import best_of
from lobs import collect_moments, zoo
from lobs.calibration.forward import call, evaluating
from lobs.zoo.datasets import mnist

PIECE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    images = parser.parse_args().images
    model = zoo.trained("lenet5")
    batches = mnist.load("train").batches(500, images)

    def forward() -> None:
        with evaluating(model):
            for batch in batches:
                call(model, batch)

    calibration = collect_moments(model, batches)
    sizes = {name: (m.count, m.moment.shape[-1]) for name, m in calibration.items()}
    pieces = {name: torch.randn(PIECE, d) for name, (_, d) in sizes.items()}

    def products() -> None:
        for name, (n, _) in sizes.items():
            y = pieces[name]
            for _ in range(-(-n // PIECE)):
                y.T @ y

    plain, bare = best_of(3, forward), best_of(3, products)
    cost = best_of(3, lambda: collect_moments(model, batches))
    print(
        f"LeNet-5, {images:,} images: forward {plain:.2f} s, bare products {bare:.2f} s, "
        f"calibration {cost:.2f} s"
    )
    for name, (n, d) in sizes.items():
        print(f"  {name}: {n:,} vectors of {d} (bias included)")
    print(
        f"  calibration is {cost / (plain + bare):.2f}× forward plus products (promised: at most "
        "2.5×)"
    )


if __name__ == "__main__":
    main()
