"""Sparse matrices as bit masks and packed values, and their products with few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias, get_args

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
_BEYOND = 64  # bytes that the kernel may read behind the last value
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
    values: Any
    masks: Any
    starts: Any
    scales: Any = None

    @classmethod
    def pack(cls, weight: Tensor, storage: Storage = "float32") -> BitMatrix:
        """Return a matrix of `weight`, whose zeros are left out.

        Args:
            weight: (rows, columns).
            storage: how values are stored; see `rounded`.
        """
        codes, scales = _coded(weight.detach(), storage)
        there = weight.detach().numpy() != 0
        rows, columns = there.shape
        words = max(1, -(-columns // _WORD))
        bits = np.zeros((rows, 8 * words), np.uint8)
        bits[:, : -(-columns // 8)] = np.packbits(there, axis=1, bitorder="little")
        starts = np.cumsum(np.concatenate([[0], there.sum(axis=1)]))[:-1].astype(np.int64)
        kept = codes[torch.from_numpy(there)]
        packed = _nibbles(kept) if storage == "int4" else kept.view(torch.uint8)
        values = np.concatenate([packed.numpy(), np.zeros(_BEYOND, np.uint8)])
        return cls((rows, columns), storage, values, bits.view("<u8"), starts, scales)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        scales = 0 if self.scales is None else int(self.scales.nbytes)
        return int(self.values.nbytes + self.masks.nbytes + self.starts.nbytes) + scales

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

    def _addresses(self, first: int) -> list[int]:
        """Return the addresses of values, masks, starts and scales, those of row `first` on."""
        scales = _zeros(self.shape[0]) if self.scales is None else self.scales
        return [self.values.ctypes.data] + [
            a.ctypes.data + first * a.strides[0] for a in (self.masks, self.starts, scales)
        ]


def rounded(weight: Tensor, storage: Storage) -> Tensor:
    """Return weights as a storage holds them, in float32.

    Integers are the nearest multiples of a row's largest magnitude divided by 127 or 7.

    Args:
        weight: (rows, …).
        storage: how values are stored.
    """
    codes, scales = _coded(weight.detach().flatten(1), storage)
    out = codes.float()
    out = out if scales is None else out * torch.from_numpy(scales).unsqueeze(1)
    return out.reshape(weight.shape)


def multiply(
    matrix: BitMatrix,
    x: Tensor,
    bias: Any = None,
    rows: tuple[int, int] | None = None,
    form: Form | None = None,
) -> Tensor:
    """Return x Wᵀ + bias for up to 16 inputs.

    Args:
        matrix: W.
        x: (samples, columns), float32.
        bias: an array of float32, one number for every row of W.
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
        begin = (_zeros(matrix.shape[0]) if bias is None else bias).ctypes.data + 4 * first
        job = [*matrix._addresses(first), begin, x.data_ptr(), out.data_ptr()]
        job += [words, x.stride(0), count]
        kernel = _kernel(matrix.storage, samples, form or this_form())
        kernel(count, job, _threads(count * words))
    return out


def reference(matrix: BitMatrix, x: Tensor, bias: Any = None) -> Tensor:
    """Return what `multiply` returns, computed by torch.

    Args:
        matrix: W.
        x: (samples, columns).
        bias: an array of float32, one number a row.
    """
    bits = np.unpackbits(matrix.masks.view(np.uint8), axis=1, bitorder="little")
    there = torch.from_numpy(bits[:, : matrix.shape[1]]).bool()
    kept = _decoded(matrix.values, matrix.storage, int(there.sum()))
    dense = torch.zeros(there.shape).masked_scatter_(there, kept)
    if matrix.scales is not None:
        dense *= torch.from_numpy(matrix.scales).unsqueeze(1)
    extra = None if bias is None else torch.from_numpy(bias)
    return torch.nn.functional.linear(x, dense, extra)


def _threads(words: int) -> int:
    return min(torch.get_num_threads(), words * bitmask_code.PARTS // _WORTH_A_THREAD)


@cache  # machine code must outlive every call
def _dense_kernel(storage: Storage, form: Form) -> Kernel:
    return Kernel(bitmask_code.dense_code(storage, form), form)


@cache  # machine code must outlive every call
def _kernel(storage: Storage, samples: int, form: Form) -> Kernel:
    return Kernel(bitmask_code.code(storage, samples, form), form)


@lru_cache(maxsize=64)
def _zeros(rows: int) -> Any:
    return np.zeros(rows, np.float32)


def _coded(weight: Tensor, storage: Storage) -> tuple[Tensor, Any]:
    """Return the numbers to store, and the scale of each row where they are integers."""
    if storage not in _LARGEST:
        return weight.to(getattr(torch, storage)), None
    most = weight.abs().amax(dim=1) if weight.numel() else weight.new_zeros(len(weight))
    scales = torch.where(most > 0, most / _LARGEST[storage], 1.0)
    return (weight / scales.unsqueeze(1)).round().to(torch.int8), scales.numpy()


def _nibbles(codes: Tensor) -> Tensor:
    """Return 4-bit numbers, two in a byte, the first in the lower half."""
    even = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(torch.uint8) & 15
    return even[::2] | (even[1::2] << 4)


def _decoded(values: Any, storage: Storage, count: int) -> Tensor:
    """Return the first `count` stored numbers as float32."""
    if storage == "int4":
        raw = torch.from_numpy(values)
        both = torch.stack([raw & 15, raw >> 4], dim=1).flatten()[:count]
        return (both.to(torch.int8) ^ 8).float() - 8
    kind = getattr(torch, storage)
    return torch.from_numpy(values[: count * kind.itemsize]).view(kind).float()
