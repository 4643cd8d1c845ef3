"""Compile LLVM code for this processor, and run it on several threads.

A kernel is a function of a job and a range of rows. A job is an array of 64-bit integers: addresses
of arrays, their sizes and strides. Threads are those of torch's own OpenMP pool, which start in a
few microseconds. Where torch has none, Python threads run the ranges.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import llvmlite.binding as llvm
import torch

from lobs._system.context import workers

Form: TypeAlias = Literal["avx512", "avx2", "generic"]
FORMS: tuple[Form, ...] = get_args(Form)

# Instructions that a form needs, as LLVM names them.
_NEEDS: dict[Form, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq", "popcnt", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "popcnt", "f16c"}),
    "generic": frozenset(),
}

_SPLIT = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define void @task(ptr %job) {
  %n32 = call i32 @omp_get_num_threads()
  %i32 = call i32 @omp_get_thread_num()
  %n = zext i32 %n32 to i64
  %i = zext i32 %i32 to i64
  %rows = load i64, ptr %job
  %up = add i64 %rows, %n
  %more = sub i64 %up, 1
  %share = udiv i64 %more, %n
  %first = mul i64 %i, %share
  %end = add i64 %first, %share
  %over = icmp ugt i64 %end, %rows
  %last = select i1 %over, i64 %rows, i64 %end
  %some = icmp ult i64 %first, %last
  br i1 %some, label %work, label %done
work:
  call void @span(ptr %job, i64 %first, i64 %last)
  br label %done
done:
  ret void
}
"""


class Kernel:
    """Machine code of one kernel. It is kept as long as the process lives.

    Args:
        code: LLVM code that defines `void @span(ptr %job, i64 %first, i64 %last)`.
        form: the instructions to use.
    """

    def __init__(self, code: str, form: Form) -> None:
        pool = _openmp()
        module = llvm.parse_assembly(code + (_SPLIT if pool else ""))
        module.verify()
        # A module belongs to its engine, so every kernel has an engine of its own.
        self._engine = llvm.create_mcjit_compiler(module, _machine(form))
        self._engine.finalize_object()
        address = self._engine.get_function_address
        span = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._span = span(address("span"))
        self._task = ctypes.c_void_p(address("task")) if pool else None

    def __call__(self, rows: int, job: Sequence[int], threads: int) -> None:
        """Run all rows on up to `threads` threads.

        Args:
            rows: number of rows.
            job: what the kernel reads, after the number of rows.
            threads: number of threads.
        """
        block = _pack(len(job))(rows, *job)
        if threads < 2:
            self._span(block, 0, rows)
        elif (pool := _openmp()) and not _forked:
            pool(self._task, block, threads, 0)
        else:
            share = -(-rows // threads)
            cuts = [(low, min(low + share, rows)) for low in range(0, rows, share)]
            jobs = [workers().submit(self._span, block, low, high) for low, high in cuts[1:]]
            self._span(block, *cuts[0])
            wait(jobs)


@cache
def _pack(fields: int) -> Callable[..., bytes]:
    return struct.Struct(f"{fields + 1}q").pack


@cache
def this_form() -> Form:
    """Return the best form that this processor can run."""
    features = llvm.get_host_cpu_features()
    return next(f for f in FORMS if all(features.get(need, False) for need in _NEEDS[f]))


def _machine(form: Form) -> Any:
    """Return a compiler for one form. It belongs to the one engine that uses it.

    Forms below the processor's own leave its further instructions unused.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if form == this_form():
        features = llvm.get_host_cpu_features().flatten()
        return target.create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
    return target.create_target_machine(features=",".join(f"+{f}" for f in _NEEDS[form]), opt=3)


@cache
def _openmp() -> Callable[..., None] | None:
    """Return `GOMP_parallel` of the OpenMP library that torch has loaded; None if there is none."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        found = {name: getattr(library, name) for name in (*_OMP, "GOMP_parallel")}
    except (OSError, AttributeError):
        return None
    for name in _OMP:
        llvm.add_symbol(name, ctypes.cast(found[name], ctypes.c_void_p).value)
    parallel = found["GOMP_parallel"]
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]


_OMP = ("omp_get_thread_num", "omp_get_num_threads")
_forked = False


def _note_fork() -> None:
    global _forked  # noqa: PLW0603
    _forked = True  # OpenMP's threads do not exist in a forked child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
