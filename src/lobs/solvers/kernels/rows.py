"""Row-wise work: each row restricts the shared matrix to its own columns."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from lobs._system.context import workers

_GATHERED = 2**20  # matrix elements gathered at a time; they fit into the cache
_LITTLE = 2**18  # matrix elements; fewer are gathered faster than a thread starts


def by_rows(work: Callable[[Tensor], None], sizes: Tensor, extra: int = 0) -> None:
    """Call `work` with the numbers of rows of similar size, on all of torch's threads.

    Args:
        work: called with the numbers of some rows.
        sizes: the size s of every row; the row gathers s·(s + extra) elements.
        extra: additional columns of every row.
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
        # The longest row of a piece determines the cost of its rows, so the long end is cut first.
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
    """Return the columns of every row's True entries, padded to (rows, longest).

    The second tensor is False at padded places.
    """
    size = int(mask.sum(dim=1).max()) if len(mask) else 0
    real, index = mask.to(torch.int8).topk(size, dim=1, sorted=False)
    return index, real.bool()


def restrict(gram: Tensor, lines: Tensor, columns: Tensor) -> Tensor:
    """Return G[lines[r, i], columns[r, j]] for every row r, as (rows, lines, columns).

    Args:
        gram: the shared matrix G.
        lines: the lines of each row.
        columns: the columns of each row.
    """
    if gram.device.type != "cpu" or find_spec("numba") is None:
        return gram[lines.unsqueeze(2), columns.unsqueeze(1)]
    from lobs.solvers.kernels.compiling import gather

    out = gram.new_empty(*lines.shape, columns.shape[1])
    gather(gram.numpy(), lines.numpy(), columns.numpy(), out.numpy())
    return out


def blocks(gram: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """Return G restricted to every row's columns; padding becomes the identity.

    Args:
        gram: the shared matrix G.
        index: the columns of each row.
        real: False at padded places.
    """
    block = restrict(gram, index, index)
    pad_with_identity(block, real)
    return block


def pad_with_identity(lines: Tensor, real: Tensor) -> None:
    """Replace padding by the identity, in place.

    The first f lines of every row, (rows, f or more, f), are those of G.
    """
    if bool(real.all()):
        return
    f = real.shape[1]
    lines *= real.unsqueeze(1)
    lines[:, :f] *= real.unsqueeze(2)
    lines[:, :f].diagonal(dim1=1, dim2=2)[~real] = 1
