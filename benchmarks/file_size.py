"""Compare compact files of pruned LeNets with dense files, gzip and zstd.

    python -m benchmarks.file_size [--samples 5000]

LeNet-300-100 keeps 7 %, LeNet-5 the paper's fractions.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

import lobs
from lobs import NumericalWarning, Sparsity, prune, zoo
from lobs.deploy.export import dense_sizes
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate

KEPT = {
    "lenet300": {"fc1": 0.051, "fc2": 0.20, "fc3": 0.65},  # 7 % of the weights, as in `lobs demo`
    "lenet5": {"conv1": 0.54, "conv2": 0.43, "fc1": 0.06, "fc2": 0.25},  # the paper's
}


def same_bits(one, other):
    return all(
        torch.equal(t.reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8))
        for n, t in one.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=5000, help="calibration images; sizes do not depend on them"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    train, test = mnist.load("train").batches(limit=given.samples), mnist.load("test").batches()
    for name, kept in KEPT.items():
        target = Sparsity({layer: 1 - k for layer, k in kept.items()})
        result = prune(zoo.trained(name), train, target, progress=False)
        state = result.model.state_dict()
        sizes = dense_sizes(state)
        print(f"\n{zoo.entry(name).title}, {result.kept_fraction:.1%} of the weights kept\n")
        print(
            "| file | bytes | of the dense file | weights | test error (%) |\n|---|---|---|---|---|"
        )
        error = error_rate(result.model, test)
        for what, size in sizes.items():
            label = what if what == "dense" else f"{what} of it"
            print(f"| {label} | {size:,} | {size / sizes['dense']:.1%} | bit-equal | {error:.2f} |")
        for values in ("same", "float16", "int8"):
            with tempfile.TemporaryDirectory() as folder:
                done = lobs.storage.save_compact(
                    result.model, Path(folder) / "x", result.masks, result.record(), values=values
                )
                loaded = lobs.load(done.path)
            assert same_bits(loaded.masks, result.masks)
            equal = (
                "bit-equal"
                if same_bits(loaded.state_dict, state)
                else f"within {max(t.largest_error for t in done.tensors):.1e}"
            )
            model = zoo.fresh(name)
            model.load_state_dict(loaded.state_dict)
            share = done.file_bytes / sizes["dense"]
            label = "compact" if values == "same" else f"compact, {values}"
            print(
                f"| {label} | {done.file_bytes:,} | {share:.1%} | {equal} | "
                f"{error_rate(model, test):.2f} |"
            )
        print(
            "\n| tensor | kept | code | positions B | values B | dense B "
            "|\n|---|---|---|---|---|---|"
        )
        with tempfile.TemporaryDirectory() as folder:
            done = lobs.storage.save_compact(
                result.model, Path(folder) / "x", result.masks, result.record()
            )
        for t in done.tensors:
            print(
                f"| {t.name} | {t.kept:,} | {t.code} | {t.position_bytes:,} | {t.value_bytes:,} | "
                f"{t.dense_bytes:,} |"
            )
        print(f"| header and record | | | | {done.header_bytes:,} | |")


if __name__ == "__main__":
    main()
