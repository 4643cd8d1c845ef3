"""The hot loops of the solvers. Each has a torch backend and a compiled one: see `BACKENDS`.

`greedy` runs greedy OBS. It takes the inverse A of an equilibrated moment, and rows of weights in
the same scale. From every row it removes, one at a time, the weight of least w²/A_qq. After each
deletion it downdates that row's inverse, A ← A − A_:q A_q:/A_qq. This is a pivoted Cholesky
factorisation of A. The first `protected` columns are never removed, but their weights move. A
`Quota` limits how many columns a group may lose; without one all columns go. Both backends return,
per row, the order of deletion (int32) and the loss of each deletion (float64).

`swap` improves masks. The state of a row with support S is the symmetric sweep of the Gram matrix
G over S,

    M_SS = −G_SS⁻¹,  M_SN = G_SS⁻¹ G_SN,  M_NN = G_NN − G_NS G_SS⁻¹ G_SN,

and a vector y: the weights on S and, off it, the correlation of the residual with each input.
Adding q lowers the error by y_q²/M_qq. Removing p raises it by −y_p²/M_pp. The effect of a swap of
both follows from M_pq. All three are exact. A swap is two rank-1 updates of M. Only the diagonal,
the pairs that may swap and the needed columns are ever formed. The best swap of a row is made until
none helps. A group swaps once, so no column is needed again after its swap.

`improve` is a local search over the supports of many small least-squares problems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.errors import SolverError

Backend: TypeAlias = str  # "auto" or a key of BACKENDS


@dataclass(frozen=True)
class KernelBackend:
    """An implementation of the hot loops: names of modules, imported on first use.

    A loop that a backend does not have is taken from another one.

    Args:
        serves: tells whether the backend can work on a matrix.
        needs: what it needs, for the message where it cannot.
        greedy: the module with `greedy_rows`.
        group_swaps: the module with `swap_rows`.
        swaps: the module with `start`, `finish` and `move`.
    """

    serves: Callable[[Tensor], bool]
    needs: str = ""
    greedy: str | None = None
    group_swaps: str | None = None
    swaps: str | None = None


def _numba_serves(matrix: Tensor) -> bool:
    on_cpu = matrix.device.type == "cpu" and matrix.dtype in (torch.float32, torch.float64)
    return on_cpu and find_spec("numba") is not None


# "auto" takes the first that serves. The torch backend serves every matrix and is the reference.
BACKENDS: dict[str, KernelBackend] = {
    "compiled": KernelBackend(
        _numba_serves,
        "numba and CPU tensors in float32 or float64",
        greedy="lobs.solvers.kernels.compiled_greedy",
        group_swaps="lobs.solvers.kernels.compiled_group_swaps",
        swaps="lobs.solvers.kernels.compiled_swaps",
    ),
    "torch": KernelBackend(
        lambda matrix: True,
        greedy="lobs.solvers.kernels.torch_greedy",
        group_swaps="lobs.solvers.kernels.torch_group_swaps",
        swaps="lobs.solvers.kernels.torch_swaps",
    ),
}


@dataclass(frozen=True, eq=False)
class Quota:
    """The number of columns that each group may lose, as int64 tensors on the CPU.

    `group[j]` is the group of column j. `allowed[group]` is the group's number.
    """

    group: Tensor
    allowed: Tensor


@dataclass(frozen=True, eq=False)
class Swaps:
    """The state that `swap` starts from, for several rows: parts of M, and y.

    `kept` holds the columns of the support in order, and `inverse` is G_SS⁻¹ over them. `p` and
    `q` are the pairs of a kept and a removed column that may swap, and `off` is M at these pairs.
    `group` holds the group of each column, −1 for none.
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


def greedy(
    inverse: Tensor,
    weight: Tensor,
    protected: int,
    quota: Quota | None = None,
    *,
    backend: Backend = "auto",
    label: str = "greedy",
) -> tuple[Tensor, Tensor]:
    """Delete weights in greedy order until no column is left, or every group has met its quota.

    Args:
        inverse: the inverse A of the equilibrated moment. Its dtype is the one computed in.
        weight: rows of weights in the same scale.
        protected: number of leading columns that are never removed.
        quota: the number of columns that each group may lose; all of them by default.
        backend: "auto" takes the compiled one where it can.
        label: the name of the progress bar.
    """
    if quota is None:  # all columns are one group, and all of them go
        d = weight.shape[1]
        quota = Quota(torch.zeros(d, dtype=torch.int64), torch.tensor([d - protected]))
    # Rows are scaled to 1, and losses back in float64, so that float32 holds them in any unit.
    weight = weight.to(torch.float64)
    size = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rows = (weight / size).to(inverse.dtype)
    kernel = _module(backend, "greedy", inverse)
    order, losses = kernel.greedy_rows(inverse.contiguous(), rows, protected, quota, label)
    return order, losses.to(torch.float64) * size.square()


def swap(state: Swaps, worth: float, *, backend: Backend = "auto") -> Tensor:
    """Make the best swap in every row while it lowers the error enough, and return the new mask.

    Args:
        state: the rows.
        worth: the least gain of a swap, relative to the row's first error.
        backend: "auto" takes the compiled one where it can.
    """
    mask: Tensor = _module(backend, "group_swaps", state.gram).swap_rows(state, worth)
    return mask


def _module(
    name: Backend, loop: Literal["greedy", "group_swaps", "swaps"], matrix: Tensor
) -> ModuleType:
    """Return the module that runs a loop on a matrix.

    Args:
        name: "auto" or a backend.
        loop: which of the backend's loops.
        matrix: what it will work on.
    """
    if name != "auto" and name not in BACKENDS:
        raise SolverError(f"unknown backend '{name}'. Use one of: auto, {', '.join(BACKENDS)}.")
    if name != "auto" and not BACKENDS[name].serves(matrix):
        raise SolverError(f"the {name} backend needs {BACKENDS[name].needs}. Use 'torch'.")
    first = [] if name == "auto" else [BACKENDS[name]]
    modules = (
        getattr(backend, loop)
        for backend in (*first, *BACKENDS.values())
        if getattr(backend, loop) is not None and backend.serves(matrix)
    )
    return import_module(next(modules))


def improve(
    gram: Tensor,
    linear: Tensor,
    inside: Tensor,
    importance: Tensor,
    *,
    backend: Backend = "auto",
    label: str = "swaps",
) -> tuple[int, Tensor]:
    """Search for better supports of many small least-squares problems, and update `inside`.

    Row i minimises vᵀ·gram[i]·v − 2·linear[i]·v over the variables inside its support. First, every
    row swaps one variable against another, the best swap first, until none helps. Then rows trade:
    one row adds the variable that gains most, another drops the one that costs least. The number
    of variables in all rows together stays the same. Both steps repeat until nothing helps.

    Returns the number of moves, and the decrease of each row's quadratic.

    Args:
        gram: one Gram matrix per row; overwritten.
        linear: one linear term per row; overwritten, inside by the best values.
        inside: the supports; overwritten.
        importance: the weight of each row's quadratic when rows trade.
        backend: "auto" takes the compiled one where it can.
        label: the name of the progress bar.
    """
    wanted = linear.clone()
    # A smaller part of a gain may be rounding.
    least = 1e-6 if gram.dtype == torch.float64 else 1e-4
    kernel = _module(backend, "swaps", gram)
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
    """Return the decrease of each row's quadratic at its best values."""
    return torch.where(inside, wanted * best, 0.0).sum(dim=1)


_TRADES = 6  # rounds of trades; each gains about a third of the round before


def _trades(
    t: Tensor, b: Tensor, inside: Tensor, importance: Tensor, least: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pair rows that gain most by one more variable with rows that lose least by one fewer.

    No row is in two pairs.
    """
    diagonal = t.diagonal(dim1=1, dim2=2)
    benefit = torch.where(~inside & (diagonal > 1e-7), b.square() / diagonal, 0.0)
    cost = torch.where(inside, b.square() / -diagonal, torch.inf)
    gain, entering = benefit.max(dim=1)
    loss, leaving = cost.min(dim=1)
    takers = (gain * importance).argsort(descending=True)
    givers = (loss * importance).argsort()
    better = (gain * importance)[takers] * (1 - least) > (loss * importance)[givers]
    # The k best takers and the k cheapest givers. A row on both lists is left out of both.
    k = int(better.sum())
    takers, givers = takers[:k], givers[:k]
    both = takers[torch.isin(takers, givers)]
    takers, givers = takers[~torch.isin(takers, both)], givers[~torch.isin(givers, both)]
    return (takers, entering[takers]), (givers, leaving[givers])
