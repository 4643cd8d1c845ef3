"""Measure how far alternating directions must go before swaps take over.

    python -m benchmarks.sketch [--layers DIR] [--sparsity 0.5 0.7] [--penalties 7 6 5 4]
        [--steps 8] [--widest 1200]

Layers: see `benchmarks.rivals`, those of 20,000 weights or more. Each cell is error and seconds
over those of the first number of penalties. All cells include the start, one round of swaps and
least squares. The first cell takes 8 steps at each penalty, the others `--steps`.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path

from benchmarks.rivals import problems
from lobs import ADMM, NumericalWarning, Problem
from lobs.solvers.least_squares import on_support
from lobs.solvers.local_search import swap

_SMALLEST = (
    20_000  # weights; smaller ones are searched from two starts, for as long as anything is found
)


def solved(problem: Problem, penalties: int, steps: int, count: int) -> tuple[float, float]:
    """Return error and seconds."""
    began = time.perf_counter()
    first = ADMM(penalties=penalties, steps=steps).support(problem, count)
    found = on_support(problem, *swap(problem, *first, rounds=1)[:2])
    return found.error, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.7])
    parser.add_argument("--penalties", type=int, nargs="*", default=[7, 6, 5, 4])
    parser.add_argument("--steps", type=int, default=8, help="for all cells but the first")
    parser.add_argument("--widest", type=int, default=1200)
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    print(f"| layer | rows×columns | sparsity | {' | '.join(map(str, given.penalties))} |")
    print("|---" * (3 + len(given.penalties)) + "|")
    found: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for name, weight, moment, bias in problems(given.layers):
        if weight.numel() < _SMALLEST or weight.shape[1] > given.widest:
            continue
        problem = Problem(weight, moment, bias_column=bias, name=name)
        solved(problem, 1, 8, problem.prunable // 2)  # compiles, and makes what all share
        for sparsity in given.sparsity:
            all_ = [
                solved(
                    problem, penalties, given.steps if i else 8, round(sparsity * problem.prunable)
                )
                for i, penalties in enumerate(given.penalties)
            ]
            ratios = [(error / all_[0][0], seconds / all_[0][1]) for error, seconds in all_]
            for penalties, ratio in zip(given.penalties, ratios, strict=True):
                found.setdefault((sparsity, penalties), []).append(ratio)
            cells = " | ".join(f"{error:.4f} in {seconds:.2f}" for error, seconds in ratios)
            print(
                f"| {name} | {weight.shape[0]}×{weight.shape[1]} | {sparsity:.0%} | {cells} |",
                flush=True,
            )
    for sparsity in given.sparsity:
        cells = [_mean(found[sparsity, penalties]) for penalties in given.penalties]
        print(f"| geometric mean (worst error) | | {sparsity:.0%} | {' | '.join(cells)} |")


def _mean(ratios: list[tuple[float, float]]) -> str:
    errors, seconds = (
        math.exp(sum(map(math.log, kind)) / len(kind)) for kind in zip(*ratios, strict=True)
    )
    return f"{errors:.4f} ({max(error for error, _ in ratios):.4f}) in {seconds:.2f}"


if __name__ == "__main__":
    main()
