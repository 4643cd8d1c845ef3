"""Compare `auto` with greedy, ADMM and the sweep on layers made to mislead.

    python -m benchmarks.made_up [--rows 128] [--columns 512] [--sparsity 0.5 0.7 0.9]

In some layers columns can replace each other, in others not: see `INPUTS`. Weights are random.
Errors and seconds are ratios; below 1 is better. Seconds are single runs.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.baselines.admm import admm
from benchmarks.baselines.column_sweep import best_column_sweep
from benchmarks.rivals import timed
from lobs import NumericalWarning, Problem, Sparsity, solve

_SAMPLES = 4000


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _pairs(d: int, apart: float) -> Tensor:
    x = _noise(_SAMPLES, d)
    x[:, : d // 2] = x[:, d - d // 2 :] + apart * _noise(_SAMPLES, d // 2)
    return x


def _copies(d: int) -> Tensor:
    x = _noise(_SAMPLES, d)
    x[:, : d // 4] = x[:, :1] + 0.05 * _noise(_SAMPLES, d // 4)
    return x


def _directions(d: int, apart: float) -> Tensor:
    return _noise(_SAMPLES, d // 8) @ _noise(d // 8, d) + apart * _noise(_SAMPLES, d)


def _half(d: int) -> Tensor:
    return torch.cat([3 * _directions(d // 2, 0.05), _noise(_SAMPLES, d - d // 2)], dim=1)


def _sums(d: int) -> Tensor:
    x, size = _noise(_SAMPLES, d), 2
    while size <= d:
        x = x + (_noise(_SAMPLES, -(-d // size)) * size**0.5).repeat_interleave(size, dim=1)[:, :d]
        size *= 2
    return x


def _decaying(d: int) -> Tensor:
    return _noise(_SAMPLES, d) * torch.logspace(0, -3, d) @ torch.linalg.qr(_noise(d, d))[0]


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "pairs, 5 % apart": lambda d: _pairs(d, 0.05),
    "pairs, 30 % apart": lambda d: _pairs(d, 0.3),
    "a quarter copies of one": _copies,
    "few directions": lambda d: _directions(d, 0.1),
    "few directions, by half": _half,
    "sums of sums": _sums,
    "a walk": lambda d: _noise(_SAMPLES, d).cumsum(dim=1),
    "a decaying spectrum": _decaying,
    "rectified": lambda d: torch.relu(_directions(d, 0.3)),
    "independent": lambda d: _noise(_SAMPLES, d),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    torch.manual_seed(0)
    shown = " / ".join(f"{s:.0%}" for s in given.sparsity)
    print(f"| inputs | error : greedy, {shown} | : ADMM | : sweep | seconds : greedy | : ADMM |")
    print("|---|---|---|---|---|---|")
    solve(Problem(torch.randn(40, 80), torch.eye(80)), "auto", Sparsity(0.5))  # compile first
    for name, inputs in INPUTS.items():
        x, weight = inputs(given.columns).double(), torch.randn(given.rows, given.columns)
        columns = [
            _ratios(weight, (x.mT @ x / len(x)).float(), sparsity) for sparsity in given.sparsity
        ]
        cells = [" / ".join(found) for found in zip(*columns, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _ratios(weight: Tensor, moment: Tensor, sparsity: float) -> list[str]:
    problem = Problem(weight, moment)
    ours, took = timed(lambda: solve(Problem(weight, moment), "auto", Sparsity(sparsity)), 1)
    greedy, greedy_took = timed(
        lambda: solve(Problem(weight, moment), "greedy", Sparsity(sparsity)), 1
    )
    theirs, published = timed(lambda: admm(weight, moment, sparsity), 1)
    swept = best_column_sweep(weight, moment, sparsity)
    errors = [
        ours.error / error
        for error in (greedy.error, problem.error_of(theirs), problem.error_of(swept))
    ]
    return [
        *(f"{ratio:.3f}" for ratio in errors),
        f"{took / greedy_took:.1f}",
        f"{took / published:.1f}",
    ]


if __name__ == "__main__":
    main()
