"""Prune a billion weights in bounded memory.

    python -m benchmarks.billion [--memory 8GB] [--layers 27] [--samples 512]

The network is a synthetic stack in bfloat16: one layer of 25,088 columns, then square layers of
6,144. Weights and inputs are random, because the cost does not depend on them. The quickest wide
solver keeps one tenth. Prints the forecast, the peak and the time. `--shapes` only predicts, with
the same cost model, the cost for transformers of 7 and 70 billion weights.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import lobs
from lobs import Sparsity
from lobs._system.memory import spelled
from lobs._system.run_log import peak_bytes
from lobs.solvers.costs import ProblemShape

# Rows, columns and how many of each in a block; blocks.
SHAPES = {
    "7 B (width 4,096, inner 11,008)": ([(4096, 4096, 4), (11008, 4096, 2), (4096, 11008, 1)], 32),
    "70 B (width 8,192, inner 28,672)": (
        [(8192, 8192, 2), (1024, 8192, 2), (28672, 8192, 2), (8192, 28672, 1)],
        80,
    ),
}


def predict(steps: int) -> None:
    """Print solving time on two cores and memory of one process.

    The memory includes the whole network and its copy in bfloat16.
    """
    for name, (block, blocks) in SHAPES.items():
        weights = blocks * sum(rows * d * count for rows, d, count in block)
        seconds = blocks * sum(
            count * lobs.ColumnSweep(steps=steps).seconds(ProblemShape(1, rows, d))
            for rows, d, count in block
        )
        work = max(4 * d**2 + 9 * rows * d for rows, d, _ in block)
        print(f"{name}: {weights:,} weights, {seconds / 3600:.1f} h, {spelled(5 * weights + work)}")


def stack(columns: int, width: int, layers: int) -> nn.Sequential:
    """Build the network layer by layer in bfloat16, so that building needs no extra memory."""
    parts: list[nn.Module] = []
    for number in range(layers):
        into = columns if number == 0 else width // 3 if number == 1 else width
        layer = nn.Linear(
            into, width // 3 if number == 0 else width, bias=False, dtype=torch.bfloat16
        )
        nn.init.normal_(layer.weight, std=into**-0.5)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts).requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--columns", type=int, default=25_088)
    parser.add_argument("--width", type=int, default=6_144)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--inputs", default="dense")
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="of conjugate gradients after the pass over the columns",
    )
    parser.add_argument("--log", help="where to write what happened when")
    parser.add_argument("--shapes", action="store_true")
    given = parser.parse_args()
    if given.shapes:
        predict(given.steps)
        return
    torch.manual_seed(0)
    model = stack(given.columns, given.width, given.layers)
    data = [
        torch.randn(128, given.columns, dtype=torch.bfloat16) for _ in range(given.samples // 128)
    ]
    weights = sum(p.numel() for p in model.parameters())
    target = Sparsity(0.9, scope="layer")
    print(f"{weights:,} weights, {spelled(2 * weights)}", flush=True)
    solver = lobs.ColumnSweep(steps=given.steps)
    print(
        lobs.forecast(
            model,
            data,
            target,
            solver=solver,
            inputs=given.inputs,
            execution=lobs.Execution(memory=given.memory),
        ),
        flush=True,
    )
    began = time.perf_counter()
    cut = lobs.prune(
        model,
        data,
        target,
        solver=solver,
        inputs=given.inputs,
        execution=lobs.Execution(memory=given.memory, log=given.log),
        progress=False,
    )
    took = time.perf_counter() - began
    print(
        f"kept {cut.kept_fraction:.4f}, {took:,.0f} s, peak {spelled(peak_bytes() or 0)} of "
        f"{given.memory}"
    )
    for phase, seconds in cut.phases.items():
        print(f"  {phase}: {seconds:,.0f} s")


if __name__ == "__main__":
    main()
