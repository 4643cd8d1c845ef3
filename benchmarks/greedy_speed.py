"""Time the greedy solver against plain torch code and against a matrix product.

    python -m benchmarks.greedy_speed [--rows 300] [--columns 784] [--full | --kernel-only]

The baseline is textbook greedy OBS: it downdates a full inverse per row, in batches of 32 rows. It
runs one batch and is scaled to all rows, because batches are independent and equal. `--full` runs
all batches. The peak is a float32 matrix product with the algorithm's number of multiply-adds,
rows·columns³/3.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.timing import best_of
from lobs.solvers.kernels import greedy

BATCH = 32


def baseline(inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Delete greedily with one copy of A per row.

    After each deletion A ← A − A_:q A_q: / A_qq over the whole matrix.
    """
    orders, losses = [], []
    for part in weight.split(BATCH):
        w, rows, d = part.clone(), *part.shape
        a = inverse.expand(rows, d, d).clone()
        every, alive = torch.arange(rows), torch.ones(rows, d, dtype=torch.bool)
        order, loss = torch.empty(rows, d, dtype=torch.long), torch.empty(rows, d)
        for t in range(d):
            diag = a.diagonal(dim1=1, dim2=2)
            score = torch.where(alive, w.square() / diag, torch.inf)
            loss[:, t], q = score.min(dim=1)
            order[:, t] = q
            column, pivot = a[every, :, q], a[every, q, q]
            w -= (w[every, q] / pivot).unsqueeze(1) * column
            a -= column.unsqueeze(2) * (column / pivot.unsqueeze(1)).unsqueeze(1)
            alive[every, q] = False
            a[every, q, q] = 1.0  # its row and column are zero now; keep the division defined
        orders.append(order)
        losses.append(loss)
    return torch.cat(orders), torch.cat(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--columns", type=int, default=784)
    parser.add_argument("--full", action="store_true", help="run the baseline on all rows")
    parser.add_argument(
        "--kernel-only",
        action="store_true",
        help="time the compiled kernel and the matrix product, nothing else",
    )
    rows, d, full, kernel_only = vars(parser.parse_args()).values()
    torch.manual_seed(0)
    x = (
        torch.randn(4 * d, d, dtype=torch.float64)
        @ (torch.eye(d) + 0.5 * torch.randn(d, d) / d**0.5).double()
    )
    psi = x.T @ x / len(x)
    scale = psi.diagonal().sqrt()
    inverse = torch.linalg.inv(psi / scale / scale.unsqueeze(1))
    weight = torch.randn(rows, d).double() * scale
    single, w = inverse.float(), weight.float()

    greedy(single, w[:4], 0, backend="compiled")  # compile, or load the compiled code
    a, b = torch.randn(d, d), torch.randn(d, max(1, rows * d // 3))
    peak = best_of(5, lambda: a @ b)
    compiled = best_of(3 if d > 1000 else 5, lambda: greedy(single, w, 0, backend="compiled"))
    gflop = 2 * rows * d**3 / 3 / 1e9
    print(
        f"greedy OBS, {rows}×{d}, all {rows * d:,} deletions, float32, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"  compiled backend        {compiled:9.2f} s   {gflop / compiled:6.1f} GFLOPS")
    print(
        f"  matrix product, same    {peak:9.2f} s   {gflop / peak:6.1f} GFLOPS, "
        f"{compiled / peak:.2f}× faster"
    )
    if not kernel_only:
        compare(inverse, weight, compiled, full=full)


def compare(inverse: Tensor, weight: Tensor, compiled: float, *, full: bool) -> None:
    """Time the baseline and the torch backend, and check that their results agree."""
    single, w, rows = inverse.float(), weight.float(), len(weight)
    few = w[: min(rows, BATCH)]
    reference = best_of(1, lambda: greedy(single, few, 0, backend="torch")) * rows / len(few)
    part = w if full else few
    slow = best_of(1, lambda: baseline(single, part)) * rows / len(part)

    order, losses = greedy(single, w, 0, backend="compiled")
    order64, losses64 = greedy(inverse, weight, 0, backend="compiled")
    plain_order, plain_losses = baseline(single, few)
    print(f"  torch backend           {reference:9.2f} s   (one batch of {len(few)} rows, scaled)")
    print(
        f"  straightforward torch   {slow:9.2f} "
        f"s{'' if full else f'   (one batch of {len(few)} rows, scaled)'}"
    )
    print(f"  compiled is {slow / compiled:.0f}× faster than straightforward torch")
    same = (order == order64).double().mean()
    total = float(losses.sum() / losses64.sum() - 1)
    print(
        f"  float32 against float64: {float(same):.3%} the same deletion at the same step, total "
        f"loss off by {total:.1e}"
    )
    agree = (order[: len(few)] == plain_order).double().mean()
    drift = float(losses[: len(few)].sum() / plain_losses.sum() - 1)
    print(
        f"  against the baseline: {float(agree):.3%} the same deletion at the same step, total "
        f"loss off by {drift:.1e}"
    )


if __name__ == "__main__":
    main()
