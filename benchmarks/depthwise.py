"""Measure what a layer of many narrow groups costs, beside one Python object a group.

Run it on an idle machine: `OMP_NUM_THREADS=1 python -m benchmarks.depthwise`. It prints the
processor seconds of one depthwise layer solved in one batch and group by group, and those of a
whole MobileNetV2 at 32 pixels where timm is installed.
"""

from __future__ import annotations

import time
from importlib.util import find_spec

import torch

import lobs
from lobs.solvers import Problem, solve, together


def problem(groups: int) -> Problem:
    """Return a depthwise 3×3 layer of random weights and correlated inputs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(groups, 400, 9, generator=g) @ (torch.eye(9) + torch.randn(9, 9, generator=g))
    moment = (x.mT @ x / 400).double()
    weight = torch.randn(groups, 1, 9, generator=g)
    return Problem(weight, moment, samples=400, positions=9)


def seconds(groups: int, many: int) -> float:
    """Return the least processor time of three solutions."""
    before, together.MANY = together.MANY, many
    best = float("inf")
    try:
        for _ in range(3):
            posed, began = problem(groups), time.process_time()
            solve(posed, "auto", keep=0.5)
            best = min(best, time.process_time() - began)
    finally:
        together.MANY = before
    return best


def main() -> None:
    """Print the times."""
    seconds(4, 1)
    for groups in (64, 192, 576):
        batch, each = seconds(groups, 16), seconds(groups, 10**9)
        print(f"{groups} groups: {batch:.3f} s in one batch, {each:.3f} s one by one")
    if find_spec("timm") is None:
        print("timm is not installed: no network")
        return
    from tests.architectures.timm_networks import NETWORKS

    model, batch_of = NETWORKS["mobilenetv2_035"]()
    began = time.process_time()
    lobs.prune(model, [batch_of(16), batch_of(16)], keep=0.5, progress=False)
    print(f"mobilenetv2_035, 32 samples at 32 px: {time.process_time() - began:.1f} s")


if __name__ == "__main__":
    main()
