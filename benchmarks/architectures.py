"""Prune every network of the architectures suite in one call: errors, deviation and time.

    python -m benchmarks.architectures [--only GLOB …] [--samples 320] [--tables plain timm …]

Each line gives the relative held-out deviation of the default call at half of the weights and that
of as many of the smallest weights removed. Then come the processor time of the call, and the same
over that of one forward pass over the data. The last lines give the share of networks without an
error and the median.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from time import process_time
from typing import Any

import torch
from tests.architectures.checks import KEPT, magnitude, outputs

import lobs
from lobs.calibration.forward import call, evaluating, fitted

TABLES = ("plain", "odd", "hugging_face", "timm_networks")
BATCH = 32
HELD_OUT = 2  # batches


def measured(make: Callable[[], Any], samples: int) -> tuple[float, float, float, float]:
    """Return two relative deviations, ours and magnitude's, and the seconds of call and pass."""
    model, batch = make()
    torch.manual_seed(1)
    batches = [batch(min(BATCH, samples)) for _ in range(max(1, samples // BATCH))]
    start = process_time()
    result = lobs.prune(model, batches, keep=KEPT, progress=False)
    seconds = process_time() - start
    assert result.kept == sum(int(mask.sum()) for mask in result.masks.values())
    taken = list(fitted(model, batches))
    start = process_time()
    with evaluating(model):
        for part in taken:
            call(model, part)
    forward = process_time() - start
    held_out = list(fitted(model, [batch(BATCH) for _ in range(HELD_OUT)]))
    wanted = outputs(model, held_out)
    size = wanted.norm()
    ours = (outputs(result.model, held_out) - wanted).norm() / size
    named = set(result.masks) <= set(model.state_dict())
    plain = (outputs(magnitude(model, result), held_out) - wanted).norm() / size if named else ours
    return float(ours), float(plain), seconds, forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of names")
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--samples", type=int, default=320)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ratios, failed, worse = [], [], []
    for table in given.tables:
        networks = import_module(f"tests.architectures.{table}").NETWORKS
        for name, make in networks.items():
            if not any(fnmatchcase(name, glob) for glob in given.only):
                continue
            try:
                ours, plain, seconds, forward = measured(make, given.samples)
            except Exception as error:  # every network has its line
                failed.append(name)
                print(f"{name:24} {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            ratios.append(seconds / forward)
            worse += [name] * (ours > plain)
            print(
                f"{name:24} ours {ours:.4f}  magnitude {plain:.4f}  {seconds:6.2f} s  "
                f"{seconds / forward:6.1f}x forward{'  WORSE' * (ours > plain)}",
                flush=True,
            )
    print(f"{len(ratios)} of {len(ratios) + len(failed)} without an error; failed: {failed}")
    print(f"worse than magnitude: {worse}")
    if ratios:
        print(f"median time over that of a forward pass: {statistics.median(ratios):.0f}x")


if __name__ == "__main__":
    main()
