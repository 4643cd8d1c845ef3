"""Work that differs from row to row: each row restricts the shared matrix to its own columns."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from lobs._system.threads import workers

_GATHERED = 2**20  # matrix elements gathered at a time, so that they stay in the cache
_LITTLE = 2**18  # so few are gathered sooner than a thread is woken


def by_rows(work: Callable[[Tensor], None], sizes: Tensor, extra: int = 0) -> None:
    """Call `work` with numbers of rows of similar size, some at a time, on all of torch's threads.

    A row of size s is expected to gather s·(s + extra) elements.
    """
    order = sizes.argsort()
    longest = int(sizes[order[-1]]) if len(order) else 0
    if len(order) * longest * (longest + extra) <= _LITTLE:
        work(order)
        return
    threads = torch.get_num_threads()
    pieces: list[Tensor] = []
    most = max(1, -(-len(order) // (2 * threads)))
    while len(order):
        # The longest row of a piece decides what each of its rows costs, so pieces are cut from the
        # long end.
        size = int(sizes[order[-1]])
        count = min(most, max(1, _GATHERED // max(1, size * (size + extra))))
        pieces.append(order[-count:])
        order = order[:-count]
    if len(pieces) <= 1:
        for piece in pieces:
            work(piece)
        return
    list(workers().map(work, pieces))


def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Column numbers of every row's True entries, (rows, longest), and which of them are real: short rows are filled up."""
    size = int(mask.sum(dim=1).max()) if len(mask) else 0
    real, index = mask.to(torch.int8).topk(size, dim=1, sorted=False)
    return index, real.bool()


def restrict(gram: Tensor, lines: Tensor, columns: Tensor) -> Tensor:
    """G[lines[r, i], columns[r, j]] for every row r, (rows, lines, columns)."""
    if gram.device.type != "cpu" or find_spec("numba") is None:
        return gram[lines.unsqueeze(2), columns.unsqueeze(1)]
    from lobs.solvers.kernels.compiled_rows import gather

    out = gram.new_empty(*lines.shape, columns.shape[1])
    gather(gram.numpy(), lines.numpy(), columns.numpy(), out.numpy())
    return out


def blocks(gram: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """G restricted to every row's columns; what is not real becomes a variable of its own that touches nothing."""
    block = restrict(gram, index, index)
    apart(block, real)
    return block


def apart(lines: Tensor, real: Tensor) -> None:
    """Make what is not real a variable of its own that touches nothing, in place; lines (rows, f or more, f) begin with G's."""
    if bool(real.all()):
        return
    f = real.shape[1]
    lines *= real.unsqueeze(1)
    lines[:, :f] *= real.unsqueeze(2)
    lines[:, :f].diagonal(dim1=1, dim2=2)[~real] = 1
