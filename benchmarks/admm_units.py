"""Compare the units that alternating directions can work in.

    python -m benchmarks.admm_units [--layers DIR] [--sparsity 0.5 0.7 0.9 0.95]

Units: columns of equal energy, of equal removal cost, or half-way. Layers: see
`benchmarks.rivals`. Each cell is the error of `solver="admm"` over that of ADMM as published. The
number of steps is the same for all units. Swaps are left out. "first ρ = 0.05" has our units and a
first penalty that ignores how independent the columns are.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from unittest import mock

from torch import Tensor

from benchmarks.baselines.admm import admm
from benchmarks.rivals import problems
from lobs import ADMM, NumericalWarning, Problem, Sparsity, solve
from lobs.solvers import admm as room


def halfway(independence: Tensor, share: float) -> Tensor:
    """Return units between equal energy and equal cost."""
    logs = independence.log()
    return ((logs - logs.mean(dim=-1, keepdim=True)) * share / 2).exp().unsqueeze(-2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.7, 0.9, 0.95])
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    ways = {"equal energy": (0.0, ADMM()), "half-way": (0.5, ADMM()), "equal cost": (1.0, ADMM())}
    ways["equal cost, first ρ = 0.05"] = (1.0, ADMM(penalty=0.05))
    print(f"| layer | rows×columns | sparsity | {' | '.join(ways)} |")
    print("|---" * (3 + len(ways)) + "|")
    logs: dict[str, list[float]] = {name: [] for name in ways}
    for name, weight, moment, bias in problems(given.layers):
        problem = Problem(weight, moment, bias_column=bias, name=name)
        for sparsity in given.sparsity:
            theirs = problem.error_of(admm(weight, moment, sparsity, protected=int(bias)))
            cells = []
            for way, (share, solver) in ways.items():
                with mock.patch.object(
                    room, "_equal", lambda independence, share=share: halfway(independence, share)
                ):
                    cells.append(solve(problem, solver, Sparsity(sparsity)).error / theirs)
                logs[way].append(math.log(cells[-1]))
            row = " | ".join(f"{cell:.3f}" for cell in cells)
            print(
                f"| {name} | {weight.shape[0]}×{weight.shape[1]} | {sparsity:.0%} | {row} |",
                flush=True,
            )
    means = " | ".join(f"{math.exp(sum(found) / len(found)):.3f}" for found in logs.values())
    print(f"| geometric mean | | | {means} |")


if __name__ == "__main__":
    main()
