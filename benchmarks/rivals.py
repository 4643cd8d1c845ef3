"""Compare `auto` with ADMM and with the shared-column-order sweep.

    python -m benchmarks.rivals [--sparsity 0.5 0.7 0.9 0.95] [--layers DIR]
        [--start 0.1 0.03] [--repeat 3] [--cpu]
    python -m benchmarks.rivals --costs [--layers DIR]

Ψ, weights and counts are the same for all. Layers: all of LeNet-300-100 and LeNet-5, and every
DIR/*.safetensors with tensors `weight` (rows, d) and `moment` (d, d). `benchmarks.layer_files`
writes such files. ADMM runs from each first penalty of `--start`, and its best error counts. The
published first penalty is 0.1; its time counts. The sweep runs with five dampings, and its best
error counts. Seconds are the least of `--repeat` runs. "ADMM" is its cheaper form for layers with
fewer rows than columns. "explicit" is the published form, with one inverse per penalty. `--costs`
compares seconds with the cost model. `--cpu` counts the process's own seconds on one thread, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.baselines.admm import admm
from benchmarks.baselines.column_sweep import best_column_sweep
from benchmarks.layer_files import read
from lobs import (
    ADMM,
    Auto,
    GreedyOBS,
    NumericalWarning,
    Problem,
    Solution,
    collect_moments,
    solve,
    zoo,
)
from lobs.layers import find_layers
from lobs.solvers.costs import COSTS
from lobs.solvers.local_search import round_work, swap
from lobs.targets import Sparsity
from lobs.zoo.datasets import mnist


def problems(folder: Path | None) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    batches = mnist.load("train").batches(500, 20_000)
    for name in ("lenet300", "lenet5"):
        model = zoo.trained(name)
        calibration = collect_moments(model, batches)
        for layer in find_layers(model):
            yield (
                f"{name} {layer.name}",
                layer.matrix()[0],
                calibration[layer.name].moment[0],
                layer.bias is not None,
            )
    for file in sorted(folder.glob("*.safetensors")) if folder else []:
        yield file.stem, *read(file)


T = TypeVar("T")


def timed(
    work: Callable[[], T], repeat: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[T, float]:
    seconds = []
    for _ in range(repeat):
        began = clock()
        found = work()
        seconds.append(clock() - began)
    return found, min(seconds)


def compare(
    name: str,
    weight: Tensor,
    moment: Tensor,
    bias: bool,
    sparsity: float,
    given: argparse.Namespace,
) -> list[float]:
    """Print one line; return auto's error over ADMM's and over the sweep's."""

    def auto() -> Solution:
        return solve(
            Problem(weight, moment, bias_column=bias, name=name), "auto", Sparsity(sparsity)
        )

    clock = time.process_time if given.cpu else time.perf_counter
    problem = Problem(weight, moment, bias_column=bias, name=name)
    published, theirs = timed(
        lambda: admm(weight, moment, sparsity, protected=int(bias), start=given.start[0]),
        given.repeat,
        clock,
    )
    _, as_published = timed(
        lambda: admm(weight, moment, sparsity, protected=int(bias), explicit=True),
        given.repeat,
        clock,
    )
    others = [
        admm(weight, moment, sparsity, protected=int(bias), start=start)
        for start in given.start[1:]
    ]
    errors = [problem.error_of(found) for found in (published, *others)]
    swept = problem.error_of(_sweep(weight, moment, sparsity, int(bias)))
    ours, took = timed(auto, given.repeat, clock)
    ratios = [ours.error / errors[0], ours.error / swept]
    print(
        f"| {name} | {weight.shape[0]}×{weight.shape[1]} | {sparsity:.0%} | {ratios[0]:.3f} | "
        f"{ours.error / min(errors):.3f} "
        f"| {ratios[1]:.3f} | {took:.3f} | {theirs:.3f} | {took / theirs:.2f} | "
        f"{took / as_published:.2f} |",
        flush=True,
    )
    return ratios


def _sweep(weight: Tensor, moment: Tensor, sparsity: float, protected: int) -> Tensor:
    """Run the sweep, which does not handle a bias, on a layer with one.

    It gets the part of Ψ that a free bias leaves. The bias then takes its best value.
    """
    if not protected:
        return best_column_sweep(weight, moment, sparsity)
    m = moment.double()
    reduced = m[:-1, :-1] - torch.outer(m[:-1, -1], m[-1, :-1]) / m[-1, -1]
    found = best_column_sweep(weight[:, :-1], reduced, sparsity)
    change = ((weight[:, :-1] - found).double() @ m[:-1, -1:]) / m[-1, -1]
    return torch.cat([found, weight[:, -1:] + change.to(weight)], dim=1)


def check_costs(folder: Path | None) -> None:
    """Print measured and predicted seconds of both starts and of a round of swaps.

    The swaps are measured at 50 and 90 %.
    """
    print(
        "| layer | rows×columns | greedy, s | predicted | ADMM, s | predicted | start by ε | by "
        "rule | round, s | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, weight, moment, bias in problems(folder):
        problem = Problem(weight, moment, bias_column=bias, name=name)
        problem.metrics  # noqa: B018 - both need it
        greedy, directions = (s.seconds(problem.shape) for s in (GreedyOBS(), ADMM()))
        if greedy > 60:
            continue
        _, took = timed(lambda p=problem: GreedyOBS().path(p), 1)  # type: ignore[misc]
        _, admms = timed(lambda p=problem: ADMM().support(p, p.prunable // 2), 2)  # type: ignore[misc]
        rounds = [_round(problem, sparsity) for sparsity in (0.5, 0.9)]
        auto = Auto()
        right = "greedy" if took <= auto.patience * admms else "ADMM"
        print(
            f"| {name} | {weight.shape[0]}×{weight.shape[1]} | {took:.3f} | {greedy:.3f} | "
            f"{admms:.3f} | {directions:.3f} "
            f"| {type(auto.start(problem)).__name__} | {right} "
            f"| {' / '.join(f'{seconds:.3f}' for seconds, _ in rounds)} | "
            f"{' / '.join(f'{guess:.3f}' for _, guess in rounds)} |",
            flush=True,
        )


def _round(problem: Problem, sparsity: float) -> tuple[float, float]:
    """Return measured and predicted seconds of one round of swaps."""
    first = ADMM().support(problem, round(sparsity * problem.prunable))
    _, seconds = timed(lambda: swap(problem, *first, rounds=1), 2)
    rows = len(problem.weight)
    work = rows * round_work(
        int(first[0].sum()) / rows, problem.weight.shape[1] - problem.protected, rows
    )
    return seconds, COSTS.product * work / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.7, 0.9, 0.95])
    parser.add_argument("--start", type=float, nargs="*", default=[0.1, 0.03])
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--costs", action="store_true")
    given = parser.parse_args()
    if given.cpu:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore", NumericalWarning)
    for kind in (torch.float32, torch.float64):  # compile first
        solve(
            Problem(torch.randn(40, 80, dtype=kind), torch.eye(80, dtype=kind)),
            "auto",
            Sparsity(0.5),
        )
    if given.costs:
        check_costs(given.layers)
        return
    print(
        "| layer | rows×columns | sparsity | auto : ADMM published | : best | : sweep | seconds | "
        "ADMM | : | : explicit |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios: dict[str, list[list[float]]] = {"up to": [], "over": []}
    for name, weight, moment, bias in problems(given.layers):
        if given.only in name:
            kind_ = "over" if weight.shape[1] > 1025 else "up to"
            ratios[kind_] += [
                compare(name, weight, moment, bias, sparsity, given) for sparsity in given.sparsity
            ]
    for kind_, values in ratios.items():
        for what, found in zip(
            ("ADMM published", "sweep"), zip(*values, strict=True), strict=False
        ):
            mean = math.exp(sum(math.log(max(v, 1e-9)) for v in found) / len(found))
            print(
                f"\n{kind_} 1,024 columns, auto : {what}: geometric mean {mean:.3f}, largest "
                f"{max(found):.3f}"
            )


if __name__ == "__main__":
    main()
