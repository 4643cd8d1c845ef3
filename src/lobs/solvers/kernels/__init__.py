"""The hot loops, each one function with two backends: `greedy`, exact greedy OBS, and `swap`, which improves its masks.

Greedy: both take the inverse A of an equilibrated moment and rows of equally scaled weights, and
remove from every row, one at a time, the weight of least w²/A_qq, downdating that row's inverse
after each deletion (A ← A − A_:q A_q:/A_qq). This *is* a pivoted Cholesky factorisation of A. The
first `protected` columns are never removed but take part in everything. A `Quota` lets every group
of columns give only so many; without one all columns go. They return, per row, the order of
deletion (int32) and what each deletion cost (float64).

Swap: the state of a row with support S is the symmetric sweep of the Gram matrix G over S,

    M_SS = −G_SS⁻¹,  M_SN = G_SS⁻¹ G_SN,  M_NN = G_NN − G_NS G_SS⁻¹ G_SN,

beside y: the weights on S and, off it, how the residual leans on each input. Letting q in lowers
the error by y_q²/M_qq, taking p out raises it by −y_p²/M_pp, and what a swap of the two does
follows from M_pq: all exact. A swap is two rank-1 updates of M, of which only the diagonal, the
pairs that may swap and the columns asked for are ever formed. The best swap of a row is made until
none helps; a group swaps once, so that a column that has swapped is never asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.errors import SolverError

Backend: TypeAlias = Literal["auto", "torch", "compiled"]


@dataclass(frozen=True, eq=False)
class Quota:
    """How many columns each group may lose: `group[j]` is column j's, `allowed[group]` its number; int64, on the CPU."""

    group: Tensor
    allowed: Tensor


@dataclass(frozen=True, eq=False)
class Swaps:
    """What `swap` starts from, for several rows: M in the parts that are needed, and y.

    `kept` holds the support's columns in order, `inverse` G_SS⁻¹ over them, `p` and `q` the pairs
    of a kept and a removed column that may change places, `off` M at those pairs, `group` the
    columns' groups, −1 for none.
    """

    gram: Tensor
    inverse: Tensor
    kept: Tensor
    group: Tensor
    mask: Tensor
    y: Tensor
    diagonal: Tensor
    p: Tensor
    q: Tensor
    off: Tensor
    error: Tensor


Kernel: TypeAlias = Callable[[Tensor, Tensor, int, Quota, str], tuple[Tensor, Tensor]]


def greedy(
    inverse: Tensor,
    weight: Tensor,
    protected: int,
    quota: Quota | None = None,
    *,
    backend: Backend = "auto",
    label: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Run greedy deletion to the end, or until every group has given its quota, in the dtype of `inverse`."""
    if quota is None:  # all columns are one group, which gives all it has
        d = weight.shape[1]
        quota = Quota(torch.zeros(d, dtype=torch.int64), torch.tensor([d - protected]))
    # Scaling a row scales its losses; done in float64, so that float32 holds them whatever the
    # layer's units.
    weight = weight.to(torch.float64)
    size = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rows = (weight / size).to(inverse.dtype)
    order, losses = _greedy_rows(backend, inverse)(
        inverse.contiguous(), rows, protected, quota, label
    )
    return order, losses.to(torch.float64) * size.square()


def swap(state: Swaps, worth: float, *, backend: Backend = "auto") -> Tensor:
    """Swap in every row while the best swap lowers its error by more than `worth` times what it was; return the new mask."""
    if _compiled(backend, state.gram):
        from lobs.solvers.kernels.compiled_group_swaps import swap_rows as compiled_rows

        return compiled_rows(state, worth)
    from lobs.solvers.kernels.torch_group_swaps import swap_rows

    return swap_rows(state, worth)


def _greedy_rows(backend: Backend, inverse: Tensor) -> Kernel:
    if _compiled(backend, inverse):
        from lobs.solvers.kernels.compiled_greedy import greedy_rows as compiled_rows

        return compiled_rows
    from lobs.solvers.kernels.torch_greedy import greedy_rows

    return greedy_rows


def _compiled(name: Backend, matrix: Tensor) -> bool:
    if name not in ("auto", "torch", "compiled"):
        raise SolverError(f"unknown backend '{name}'. There are: auto, torch, compiled.")
    on_cpu = matrix.device.type == "cpu" and matrix.dtype in (torch.float32, torch.float64)
    possible = on_cpu and find_spec("numba") is not None
    if name == "compiled" and not possible:
        raise SolverError(
            "the compiled backend needs numba and CPU tensors in float32 or float64. Use 'torch'."
        )
    return possible and name != "torch"


def improve(
    gram: Tensor,
    linear: Tensor,
    inside: Tensor,
    importance: Tensor,
    *,
    backend: Backend = "auto",
    label: str = "swaps",
) -> tuple[int, Tensor]:
    """Local search for the best subset in every row of a batch of small least-squares problems; `inside` in place.

    Row i has the quadratic vᵀ·gram[i]·v − 2·linear[i]·v over variables that are inside.
    Add-one-drop-one swaps are taken, the best first, until none helps; then rows trade: a variable
    enters where it gains most and another leaves where it costs least, weighted by `importance`, so
    that the number inside is kept in all rows together; and so on until nothing helps. `gram` and
    `linear` are overwritten, the latter inside by the best values. Returns the number of moves, and
    by how much each row's quadratic has fallen.
    """
    wanted = linear.clone()
    least = (
        1e-6 if gram.dtype == torch.float64 else 1e-4
    )  # share of a gain below which a swap may be rounding
    kernel = _swaps(backend, gram)
    kernel.start(gram, linear, inside, label)
    before = _explained(wanted, linear, inside)
    rows, moves = torch.arange(len(gram), device=gram.device), 0
    for _ in range(_TRADES):
        moves += kernel.finish(gram, linear, inside, rows, least, label)
        (takers, entering), (givers, leaving) = _trades(gram, linear, inside, importance, least)
        if not len(takers):
            break
        kernel.move(gram, linear, takers, entering, True)
        kernel.move(gram, linear, givers, leaving, False)
        inside[takers, entering], inside[givers, leaving] = True, False
        rows = torch.cat([takers, givers])
        moves += len(takers)
    return moves, _explained(wanted, linear, inside) - before


def _explained(wanted: Tensor, best: Tensor, inside: Tensor) -> Tensor:
    """What the best values take off each row's quadratic: the linear term's product with them."""
    return torch.where(inside, wanted * best, 0.0).sum(dim=1)


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
    # The k best takers and k cheapest givers; a row on both lists would change twice, so it does
    # neither.
    k = int(better.sum())
    takers, givers = takers[:k], givers[:k]
    both = takers[torch.isin(takers, givers)]
    takers, givers = takers[~torch.isin(takers, both)], givers[~torch.isin(givers, both)]
    return (takers, entering[takers]), (givers, leaving[givers])


def _swaps(name: Backend, gram: Tensor) -> ModuleType:
    if _compiled(name, gram):
        from lobs.solvers.kernels import compiled_swaps

        return compiled_swaps
    from lobs.solvers.kernels import torch_swaps

    return torch_swaps
