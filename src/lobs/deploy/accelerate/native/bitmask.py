"""Sparse matrices as bit masks and packed values, and their products with few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from lobs.deploy.accelerate.native import bitmask_code
from lobs.deploy.accelerate.native.machine_code import Form, Kernel, this_form

Storage: TypeAlias = Literal["float32", "float16", "bfloat16", "int8", "int4"]
STORAGES: tuple[Storage, ...] = get_args(Storage)
#: Samples that one call of the kernel computes; more are computed with dense rows.
MOST_SAMPLES = 16

_WORD = 16 * bitmask_code.PARTS  # columns of one mask
BEYOND = 64  # bytes that the kernel may read behind the last value
_WORTH_A_THREAD = 40_000  # groups of 16 columns that take about as long as starting a thread
_LARGEST: dict[str, int] = {"int8": 127, "int4": 7}  # codes are −largest … largest


@dataclass(frozen=True, eq=False)
class BitMatrix:
    """A sparse matrix: one bit for each weight, and the kept weights packed row by row.

    Args:
        shape: rows and columns.
        storage: how values are stored. Integers are multiplied with a scale for each row.
        values: the kept weights.
        masks: (rows, words); bit i of word j is column 64·j + i.
        starts: number of each row's first value.
        scales: what a row's integers are multiplied with; None for other storages.
    """

    shape: tuple[int, int]
    storage: Storage
    values: Tensor
    masks: Tensor
    starts: Tensor
    scales: Tensor | None = None

    @classmethod
    def pack(cls, weight: Tensor, storage: Storage = "float32") -> BitMatrix:
        """Return a matrix of `weight`, whose zeros are left out.

        Args:
            weight: (rows, columns).
            storage: how values are stored; see `rounded`.
        """
        codes, scales = coded(weight.detach(), storage)
        there = weight.detach().numpy() != 0
        rows, columns = there.shape
        words = max(1, -(-columns // _WORD))
        bits = np.zeros((rows, 8 * words), np.uint8)
        bits[:, : -(-columns // 8)] = np.packbits(there, axis=1, bitorder="little")
        starts = np.cumsum(np.concatenate([[0], there.sum(axis=1)]))[:-1].astype(np.int64)
        kept = codes[torch.from_numpy(there)]
        packed = nibbles(kept) if storage == "int4" else kept.view(torch.uint8)
        values = np.concatenate([packed.numpy(), np.zeros(BEYOND, np.uint8)])
        masks = torch.from_numpy(bits.view("<i8"))
        numbers, first = torch.from_numpy(values), torch.from_numpy(starts)
        return cls((rows, columns), storage, numbers, masks, first, scales)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        arrays = (self.values, self.masks, self.starts, self.scales)
        return sum(array.nbytes for array in arrays if array is not None)

    def dense(self, first: int = 0, last: int | None = None, form: Form | None = None) -> Tensor:
        """Return rows `first` to `last` (exclusive) as a dense float32 matrix.

        Args:
            first: the first row.
            last: the row after the last; all by default.
            form: the instructions to use; by default the best that this processor has.
        """
        count = (self.shape[0] if last is None else last) - first
        words = self.masks.shape[1]
        out = torch.empty(count, words * _WORD)
        if out.numel():
            job = [*self._addresses(first), 0, 0, out.data_ptr(), words]
            threads = _threads(count * words)
            _dense_kernel(self.storage, form or this_form())(count, job, threads)
        return out[:, : self.shape[1]]

    def _addresses(self, first: int) -> tuple[int, int, int, int]:
        """Return the addresses of values, masks, starts and scales, those of row `first` on."""
        masks, starts, scales = self.masks, self.starts, self.scales
        return (
            self.values.data_ptr(),
            masks.data_ptr() + 8 * first * masks.shape[1],
            starts.data_ptr() + 8 * first,
            (starts if scales is None else scales).data_ptr() + 4 * first,
        )


def rounded(weight: Tensor, storage: Storage) -> Tensor:
    """Return weights as a storage holds them, in float32.

    Integers are the nearest multiples of a row's largest magnitude divided by 127 or 7.

    Args:
        weight: (rows, …).
        storage: how values are stored.
    """
    codes, scales = coded(weight.detach().flatten(1), storage)
    out = codes.float()
    out = out if scales is None else out * scales.unsqueeze(1)
    return out.reshape(weight.shape)


def multiply(
    matrix: BitMatrix,
    x: Tensor,
    bias: Tensor | None = None,
    rows: tuple[int, int] | None = None,
    form: Form | None = None,
) -> Tensor:
    """Return x Wᵀ + bias for up to 16 inputs.

    Args:
        matrix: W.
        x: (samples, columns), float32.
        bias: float32, one number for every row of W.
        rows: the first row to compute, and the row after the last; all by default.
        form: the instructions to use; by default the best that this processor has.
    """
    samples, columns = x.shape
    first, last = (0, matrix.shape[0]) if rows is None else rows
    count, words = last - first, matrix.masks.shape[1]
    if columns != words * _WORD or x.stride(1) != 1:
        padded = x.new_zeros(samples, words * _WORD)
        padded[:, :columns] = x
        x = padded
    out = torch.empty(samples, count)
    if out.numel():
        begin = (zeros(matrix.shape[0]) if bias is None else bias).data_ptr() + 4 * first
        job = [*matrix._addresses(first), begin, x.data_ptr(), out.data_ptr()]
        job += [words, x.stride(0), count]
        kernel = _kernel(matrix.storage, samples, form or this_form())
        kernel(count, job, _threads(count * words))
    return out


def reference(matrix: BitMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `multiply` returns, computed by torch.

    Args:
        matrix: W.
        x: (samples, columns).
        bias: float32, one number a row.
    """
    bits = np.unpackbits(matrix.masks.numpy().view(np.uint8), axis=1, bitorder="little")
    there = torch.from_numpy(bits[:, : matrix.shape[1]]).bool()
    kept = decoded(matrix.values, matrix.storage, 0, int(there.sum()))
    dense = torch.zeros(there.shape).masked_scatter_(there, kept)
    if matrix.scales is not None:
        dense *= matrix.scales.unsqueeze(1)
    return torch.nn.functional.linear(x, dense, bias)


def _threads(words: int) -> int:
    return min(torch.get_num_threads(), words * bitmask_code.PARTS // _WORTH_A_THREAD)


@cache  # machine code must outlive every call
def _dense_kernel(storage: Storage, form: Form) -> Kernel:
    return Kernel(bitmask_code.dense_code(storage, form), form)


@cache  # machine code must outlive every call
def _kernel(storage: Storage, samples: int, form: Form) -> Kernel:
    return Kernel(bitmask_code.code(storage, samples, form), form)


@lru_cache(maxsize=64)
def zeros(rows: int) -> Tensor:
    """Return zeros that nobody writes to."""
    return torch.zeros(rows)


def coded(weight: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """Return the numbers to store, and the scale of each row where they are integers."""
    if storage not in _LARGEST:
        return weight.to(getattr(torch, storage)), None
    most = weight.abs().amax(dim=1) if weight.numel() else weight.new_zeros(len(weight))
    scales = torch.where(most > 0, most / _LARGEST[storage], 1.0)
    return (weight / scales.unsqueeze(1)).round().to(torch.int8), scales


def nibbles(codes: Tensor) -> Tensor:
    """Return 4-bit numbers, two in a byte, the first in the lower half."""
    even = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(torch.uint8) & 15
    return even[::2] | (even[1::2] << 4)


def decoded(values: Tensor, storage: Storage, first: int, last: int) -> Tensor:
    """Return stored numbers `first` to `last` (exclusive) as float32."""
    if storage == "int4":
        part = values[first // 2 : -(-last // 2)]
        both = torch.stack([part & 15, part >> 4], dim=1).flatten()[first % 2 :][: last - first]
        return (both.to(torch.int8) ^ 8).float() - 8
    kind = getattr(torch, storage)
    return values[first * kind.itemsize : last * kind.itemsize].view(kind).float()
