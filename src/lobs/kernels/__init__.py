"""The hot loop of exact greedy OBS, one function with two backends.

Both take the inverse A of an equilibrated moment and rows of equally scaled weights, and remove from every row, one at a
time, the weight of least w²/A_qq, downdating that row's inverse after each deletion (A ← A − A_:q A_q:/A_qq). This
*is* a pivoted Cholesky factorisation of A. The first `protected` columns are never removed but take part in everything.
They return, per row, the order of deletion (int32) and what each deletion cost (float64).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.errors import SolverError

Backend: TypeAlias = Literal["auto", "torch", "compiled"]
Kernel: TypeAlias = Callable[[Tensor, Tensor, int, str], tuple[Tensor, Tensor]]


def greedy(
    inverse: Tensor, weight: Tensor, protected: int, *, backend: Backend = "auto", label: str = "exact"
) -> tuple[Tensor, Tensor]:
    """Run greedy deletion to the end for every row, in the dtype of `inverse`."""
    # Scaling a row scales its losses; done in float64, so that float32 holds them whatever the layer's units.
    weight = weight.to(torch.float64)
    size = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rows = (weight / size).to(inverse.dtype)
    order, losses = _backend(backend, inverse)(inverse.contiguous(), rows, protected, label)
    return order, losses.to(torch.float64) * size.square()


def _backend(name: Backend, inverse: Tensor) -> Kernel:
    if name not in ("auto", "torch", "compiled"):
        raise SolverError(f"unknown backend '{name}'. There are: auto, torch, compiled.")
    on_cpu = inverse.device.type == "cpu" and inverse.dtype in (torch.float32, torch.float64)
    has_numba = find_spec("numba") is not None
    if name == "compiled" and not (on_cpu and has_numba):
        raise SolverError("the compiled backend needs numba and CPU tensors in float32 or float64. Use 'torch'.")
    if name == "torch" or not (on_cpu and has_numba):
        from lobs.kernels.torch_greedy import greedy_rows

        return greedy_rows
    from lobs.kernels.compiled_greedy import greedy_rows as compiled_rows

    return compiled_rows


def improve(
    gram: Tensor,
    linear: Tensor,
    inside: Tensor,
    importance: Tensor,
    *,
    backend: Backend = "auto",
    label: str = "swaps",
) -> int:
    """Local search for the best subset in every row of a batch of small least-squares problems; `inside` in place.

    Row i has the quadratic vᵀ·gram[i]·v − 2·linear[i]·v over variables that are inside. Add-one-drop-one swaps are taken, the
    best first, until none helps; then rows trade: a variable enters where it gains most and another leaves where it costs
    least, weighted by `importance`, so that the number inside is kept in all rows together; and so on until nothing helps.
    `gram` and `linear` are overwritten. Returns the number of moves.
    """
    least = 1e-6 if gram.dtype == torch.float64 else 1e-4  # share of a gain below which a swap may be rounding
    kernel = _swaps(backend, gram)
    kernel.start(gram, linear, inside, label)
    rows, moves = torch.arange(len(gram), device=gram.device), 0
    for _ in range(_TRADES):
        moves += kernel.settle(gram, linear, inside, rows, least, label)
        (takers, entering), (givers, leaving) = _trades(gram, linear, inside, importance, least)
        if not len(takers):
            break
        kernel.move(gram, linear, takers, entering, True)
        kernel.move(gram, linear, givers, leaving, False)
        inside[takers, entering], inside[givers, leaving] = True, False
        rows = torch.cat([takers, givers])
        moves += len(takers)
    return moves


_TRADES = 6  # each finds about a third of what the one before it found


def _trades(
    t: Tensor, b: Tensor, inside: Tensor, importance: Tensor, least: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pair the rows that gain most by one more variable with those that lose least by one fewer; no row is in two pairs."""
    diagonal = t.diagonal(dim1=1, dim2=2)
    benefit = torch.where(~inside & (diagonal > 1e-7), b.square() / diagonal, 0.0)
    cost = torch.where(inside, b.square() / -diagonal, torch.inf)
    gain, entering = benefit.max(dim=1)
    loss, leaving = cost.min(dim=1)
    takers = (gain * importance).argsort(descending=True)
    givers = (loss * importance).argsort()
    better = (gain * importance)[takers] * (1 - least) > (loss * importance)[givers]
    # The k best takers and k cheapest givers; a row on both lists would change twice, so it does neither.
    k = int(better.sum())
    takers, givers = takers[:k], givers[:k]
    both = takers[torch.isin(takers, givers)]
    takers, givers = takers[~torch.isin(takers, both)], givers[~torch.isin(givers, both)]
    return (takers, entering[takers]), (givers, leaving[givers])


def _swaps(name: Backend, gram: Tensor) -> ModuleType:
    from lobs.kernels import torch_swaps

    if name == "torch" or _backend(name, gram) is _backend("torch", gram):
        return torch_swaps
    from lobs.kernels import compiled_swaps

    return compiled_swaps
