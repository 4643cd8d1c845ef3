"""Sparse matrices as lists of weights and plane offsets, and their products with many positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lobs.deploy.accelerate.native import planes_code
from lobs.deploy.accelerate.native.machine_code import Form, Kernel, this_form

_SUMS = {1: 2, 2: 1, 4: 1}  # weights that are added at a time, by rows of a block
_WORTH_A_THREAD = 400_000  # multiply-adds that take about as long as starting a thread


@dataclass(frozen=True, eq=False)
class PlaneMatrix:
    """A sparse matrix: for each block of rows the columns of its weights, and their values.

    Args:
        shape: rows and columns.
        block: rows that share their columns.
        values: (weights, block) numbers.
        columns: the column of each of the weights.
        starts: number of each row block's first weight, and the number of all.
    """

    shape: tuple[int, int]
    block: int
    values: Tensor
    columns: Tensor
    starts: Tensor

    @classmethod
    def pack(cls, weight: Tensor, block: int = 1) -> PlaneMatrix:
        """Return a matrix of `weight`, whose zeros are left out.

        Args:
            weight: (rows, columns).
            block: rows that share their columns. It divides the number of rows.
        """
        dense = weight.detach().numpy()
        rows, columns = dense.shape
        blocks = dense.reshape(-1, block, columns)
        there = (blocks != 0).any(axis=1)
        counts = there.sum(axis=1)
        step = _SUMS[block]
        padded = np.maximum(step, -(-counts // step) * step)
        starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
        owner, column = np.nonzero(there)
        first = np.concatenate([[0], np.cumsum(counts)])[:-1]
        place = starts[owner] + np.arange(len(owner)) - first[owner]
        values = np.zeros((int(starts[-1]), block), np.float32)
        values[place] = blocks[owner, :, column]
        places = np.zeros(int(starts[-1]), np.uint32)
        places[place] = column
        # A padding weight is zero; its plane is one that the row reads anyway.
        last = np.where(counts > 0, places[np.maximum(starts[:-1] + counts - 1, 0)], 0)
        real = np.zeros(len(places), bool)
        real[place] = True
        places = np.where(real, places, np.repeat(last, padded)).astype(np.int32)
        arrays = map(torch.from_numpy, (values, places, starts))
        return cls((rows, columns), block, *arrays)

    def owners(self) -> Any:
        """Return the row block of each weight."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts.numpy()))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return self.values.nbytes + self.columns.nbytes + self.starts.nbytes

    def dense(self) -> Tensor:
        """Return a dense float32 matrix."""
        rows, columns = self.shape
        out = np.zeros((rows // self.block, self.block, columns), np.float32)
        values, owner = self.values.numpy(), self.owners()
        real = (values != 0).any(axis=1)  # padding weights name a column that has another
        out[owner[real], :, self.columns.numpy()[real]] = values[real]
        return torch.from_numpy(out.reshape(rows, columns))


def block_of(weight: Tensor) -> int:
    """Return how many consecutive rows share their columns: 4, 2 or 1.

    Args:
        weight: (rows, columns).
    """
    there = weight.detach() != 0
    for block in (4, 2):
        if len(there) % block == 0:
            groups = there.reshape(-1, block, there.shape[1])
            if bool((groups == groups[:, :1]).all()):
                return block
    return 1


def add_planes(
    matrix: PlaneMatrix,
    planes: Tensor,
    out: Tensor,
    bias: Tensor,
    *,
    span: int,
    pitch: int,
    places: Tensor | None = None,
    form: Form | None = None,
) -> None:
    """Write the sums of planes times weights, plus the bias, to `out`.

    Args:
        matrix: the weights.
        planes: the numbers of all planes.
        out: (rows, at least `span`), written.
        bias: float32, one number a row.
        span: number of positions.
        pitch: a plane begins at its weight's place times this number.
        places: the place of each weight; its column by default.
        form: the instructions to use; by default the best that this processor has.
    """
    places = matrix.columns if places is None else places
    job = [a.data_ptr() for a in (matrix.values, places, matrix.starts, bias)]
    job += [planes.data_ptr(), out.data_ptr(), span, pitch, out.stride(0)]
    rows = len(matrix.starts) - 1
    work = matrix.values.numel() * span
    threads = min(torch.get_num_threads(), rows, work // _WORTH_A_THREAD)
    if rows and span:
        _kernel(matrix.block, form or this_form())(rows, job, threads)


@cache  # machine code must outlive every call
def _kernel(block: int, form: Form) -> Kernel:
    return Kernel(planes_code.code(block, _SUMS[block]), form)
