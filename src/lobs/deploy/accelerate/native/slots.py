"""Sparse matrices with few weights as slots of 16 rows, and their products with few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lobs.deploy.accelerate.native import slots_code
from lobs.deploy.accelerate.native.bitmask import (
    BEYOND,
    Storage,
    coded,
    decoded,
    nibbles,
    zeros,
)
from lobs.deploy.accelerate.native.machine_code import Kernel, this_form
from lobs.deploy.accelerate.native.slots_code import ROWS, UNROLL, WINDOW

_MOST_WINDOWS = 2**16  # a slot's head has 16 bits for the number of its window
_WORTH_A_THREAD = 20_000  # slots that take about as long as starting a thread


@dataclass(frozen=True, eq=False)
class SlotMatrix:
    """A sparse matrix: 16 rows form a group, and a slot holds one weight of each at most.

    Args:
        shape: rows and columns.
        storage: how values are stored. Integers are multiplied with a scale for each row.
        values: the kept weights, slot by slot.
        heads: for each slot the rows that have a weight, 16 bits, and above them its window.
        places: (slots, 16) columns inside the window.
        first: number of each group's first slot, and the number of all.
        starts: number of each group's first value.
        scales: what a row's integers are multiplied with; None for other storages.
    """

    shape: tuple[int, int]
    storage: Storage
    values: Tensor
    heads: Tensor
    places: Tensor
    first: Tensor
    starts: Tensor
    scales: Tensor | None = None

    @classmethod
    def pack(cls, weight: Tensor, storage: Storage = "float32") -> SlotMatrix:
        """Return a matrix of `weight`, whose zeros are left out.

        Args:
            weight: (rows, columns).
            storage: how values are stored; see `bitmask.rounded`.
        """
        rows, columns = weight.shape
        groups, windows = -(-rows // ROWS), max(1, -(-columns // WINDOW))
        codes, scales = coded(weight.detach(), storage)
        row, column = np.nonzero(weight.detach().numpy())
        # Weights of one row and window come one after another: their ranks are their slots.
        part = row * windows + column // WINDOW
        counts = np.bincount(part, minlength=groups * ROWS * windows)
        rank = np.arange(len(part)) - (np.cumsum(counts) - counts)[part]
        most = counts.reshape(groups, ROWS, windows).max(axis=1)  # slots of a group and window
        padded = -(-most.sum(axis=1) // UNROLL) * UNROLL
        first = np.concatenate([[0], np.cumsum(padded)])
        begin = first[:-1, None] + np.cumsum(most, axis=1) - most
        slot, lane = begin[row // ROWS, column // WINDOW] + rank, row % ROWS
        there = np.zeros((first[-1], ROWS), bool)
        there[slot, lane] = True
        heads = np.packbits(there, axis=1, bitorder="little").view("<u2")[:, 0].astype(np.uint32)
        heads[slot] |= (column // WINDOW).astype(np.uint32) << 16
        places = np.zeros(there.shape, np.uint8)
        places[slot, lane] = column % WINDOW
        spread = codes.new_zeros(there.shape)
        spread[torch.from_numpy(slot), torch.from_numpy(lane)] = codes[weight.detach() != 0]
        kept = spread[torch.from_numpy(there)]
        packed = nibbles(kept) if storage == "int4" else kept.view(torch.uint8)
        values = torch.cat([packed, packed.new_zeros(BEYOND)])
        totals = counts.reshape(groups, -1).sum(axis=1)
        starts = np.cumsum(totals) - totals
        if scales is not None:
            scales = torch.nn.functional.pad(scales, [0, groups * ROWS - rows])
        numbers, begins = torch.from_numpy(first), torch.from_numpy(starts)
        flat = torch.from_numpy(heads.view(np.int32))
        where = torch.from_numpy(places)
        return cls((rows, columns), storage, values, flat, where, numbers, begins, scales)

    @staticmethod
    def holds(columns: int) -> bool:
        """Return whether a matrix can be packed, and this processor has the instructions."""
        return this_form() == "avx512" and columns <= WINDOW * _MOST_WINDOWS

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        arrays = (self.values, self.heads, self.places, self.first, self.starts, self.scales)
        return sum(array.nbytes for array in arrays if array is not None)

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows `first` to `last` (exclusive) as a dense float32 matrix."""
        last = self.shape[0] if last is None else last
        low, high = first // ROWS, -(-last // ROWS)
        begin, end = self.first[[low, high]].tolist()
        heads = self.heads[begin:end].numpy().view(np.uint32)
        there = (heads[:, None] >> np.arange(ROWS, dtype=np.uint32) & 1).astype(bool)
        slot, lane = np.nonzero(there)
        group = np.searchsorted(self.first.numpy(), slot + begin, side="right") - 1
        row = torch.from_numpy((group - low) * ROWS + lane)
        column = (heads[slot] >> 16).astype(np.int64) * WINDOW + self.places.numpy()[
            slot + begin, lane
        ]
        start = int(self.starts[low]) if low < high else 0
        kept = decoded(self.values, self.storage, start, start + len(slot))
        if self.scales is not None:
            kept = kept * self.scales[low * ROWS + row]
        out = torch.zeros((high - low) * ROWS, self.shape[1])
        out[row, torch.from_numpy(column)] = kept
        return out[first - low * ROWS : last - low * ROWS]


def multiply_slots(
    matrix: SlotMatrix,
    x: Tensor,
    bias: Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Return x Wᵀ + bias for up to 16 inputs.

    Args:
        matrix: W.
        x: (samples, columns), float32.
        bias: float32, one number for every row of W.
        rows: the first row to compute, and the row after the last; all by default.
    """
    samples, columns = x.shape
    first, last = (0, matrix.shape[0]) if rows is None else rows
    if columns % WINDOW or not columns or x.stride(1) != 1:
        padded = x.new_zeros(samples, max(1, -(-columns // WINDOW)) * WINDOW)
        padded[:, :columns] = x
        x = padded
    low, high = first // ROWS, -(-last // ROWS)
    out = torch.empty(samples, (high - low) * ROWS)
    if out.numel():
        whole = len(matrix.starts) * ROWS
        bias = zeros(whole) if bias is None else bias
        if len(bias) != whole:
            bias = torch.nn.functional.pad(bias, [0, whole - len(bias)])
        scales = bias if matrix.scales is None else matrix.scales
        job = [a.data_ptr() for a in (matrix.values, matrix.heads, matrix.places)]
        job += [a.data_ptr() + 8 * low for a in (matrix.first, matrix.starts)]
        job += [a.data_ptr() + 4 * ROWS * low for a in (scales, bias)]
        job += [x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0)]
        slots = len(matrix.heads) * (high - low) // max(1, len(matrix.starts))
        threads = min(torch.get_num_threads(), slots // _WORTH_A_THREAD)
        _kernel(matrix.storage, samples)(high - low, job, threads)
    begin = first - low * ROWS
    if begin == 0 and out.shape[1] == last - first:
        return out
    return out[:, begin : begin + last - first].contiguous()


@cache  # machine code must outlive every call
def _kernel(storage: Storage, samples: int) -> Kernel:
    return Kernel(slots_code.code(storage, samples), "avx512")
