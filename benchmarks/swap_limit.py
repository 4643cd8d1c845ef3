"""Measure how much error is left after swaps.

    python -m benchmarks.swap_limit LAYER.safetensors … [--sparsity 0.5 0.9] [--kicks 100]
        [--rows 64]

A kick exchanges two to seven weights of a row at random. Then the best swap over all columns is
taken until none helps, and the better row is kept. The table gives the error over ADMM's after
`auto` and after the kicks. Where they hardly differ, `auto` is near the limit of exchanging
weights.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines.admm import admm
from benchmarks.layer_files import read
from lobs import NumericalWarning, Problem, Sparsity, solve
from lobs.solvers.kernels.compiled_swaps import finish, start


class Rows:
    """Hold a sample of a layer's rows as least-squares problems over all columns."""

    def __init__(self, problem: Problem, rows: Tensor) -> None:
        metric = problem.metrics[0]
        self.gram, scaled = metric.gram, metric.scaled(problem.weight)[rows]
        self.linear = scaled @ self.gram
        self.energy = (self.linear * scaled).sum(dim=1)
        self.rows = torch.arange(len(rows))

    def finished(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Return a support that no swap improves, and its error, row by row."""
        t, b, inside = self.gram.repeat(len(self.rows), 1, 1), self.linear.clone(), inside.clone()
        start(t, b, inside, "limit")
        finish(t, b, inside, self.rows, 1e-6, "limit")
        return inside, self.energy - (torch.where(inside, b, 0.0) * self.linear).sum(dim=1)


def kicked(inside: Tensor, free: int, swaps: int) -> Tensor:
    trial, rows = inside.clone(), torch.arange(len(inside))
    for _ in range(swaps):
        kept = trial[:, :free].double()
        # A row with nothing inside, or nothing outside, keeps what it has.
        able = (kept.sum(dim=1) > 0) & (kept.sum(dim=1) < free)
        leaving, entering = (
            torch.multinomial(p + 1e-12, 1).squeeze(1)[able] for p in (kept, 1 - kept)
        )
        trial[rows[able], leaving], trial[rows[able], entering] = False, True
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layers", type=Path, nargs="+")
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.9])
    parser.add_argument("--kicks", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    torch.manual_seed(0)
    print(
        f"| layer | rows×columns | sparsity | auto : ADMM, {given.rows} rows | after {given.kicks} "
        "kicks |"
    )
    print("|---|---|---|---|---|")
    for file in given.layers:
        weight, moment, bias = read(file)
        problem = Problem(weight, moment, bias_column=bias, name=file.stem)
        picked = torch.randperm(len(weight))[: given.rows]
        for sparsity in given.sparsity:
            found = solve(problem, "auto", Sparsity(sparsity))
            rows = Rows(problem, picked)
            delta = (admm(weight, moment, sparsity, protected=int(bias)) - weight).double()[picked]
            theirs = float(((delta @ moment.double()) * delta).sum())
            best, error = rows.finished(found.mask[picked])
            first = float(error.sum())
            for turn in range(given.kicks):
                trial, value = rows.finished(
                    kicked(best, weight.shape[1] - problem.protected, 2 + turn % 6)
                )
                better = value < error
                best[better], error = trial[better], torch.minimum(error, value)
            shape = f"{weight.shape[0]}×{weight.shape[1]}"
            print(
                f"| {file.stem} | {shape} | {sparsity:.0%} | {first / theirs:.4f} | "
                f"{float(error.sum()) / theirs:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
