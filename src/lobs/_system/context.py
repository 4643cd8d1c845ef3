"""Say which processes, threads and memory the work at hand may use.

There is one current context. `use` replaces it for a block. Solvers never ask for it: the
`Problem` that they solve carries the context it was built in.

One pool of threads serves work on rows: starting a thread costs more than a small layer.

One job of this process works at a time. Pruning and training choose torch's attention kernels, and
training seeds torch's generator. Both exist once for each process. A second job therefore waits for
the first; it gives the same bits as alone. Threads that only run networks of their own do not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from lobs._system.distributed import SINGLE_PROCESS, ProcessGroup
from lobs._system.memory import MemoryLimit, scratch
from lobs._system.run_log import logger


@dataclass(frozen=True)
class Context:
    """The processes and the memory that a piece of work may use.

    >>> Context().affords(1e15)
    True
    >>> Context(memory=MemoryLimit(total=1000, per_layer=100)).affords(101)
    False
    """

    group: ProcessGroup = SINGLE_PROCESS
    memory: MemoryLimit | None = None

    def affords(self, count: float) -> bool:
        """Return whether the limit leaves `count` bytes for one layer.

        The answer depends on the limit alone, not on what is free now, so that runs repeat.
        """
        return self.memory is None or count <= self.memory.per_layer

    def fits(self, count: float) -> bool:
        """Return whether `count` more bytes may become resident now."""
        return self.memory is None or count <= self.memory.room()

    def scratch(self, tensor: Tensor) -> AbstractContextManager[Callable[[], Tensor]]:
        """Yield a function that returns a copy of `tensor` to overwrite; see `memory.scratch`."""
        return scratch(tensor, copies=self.fits(tensor.numel() * tensor.element_size()))


_current: ContextVar[Context] = ContextVar("lobs_context", default=Context())  # noqa: B039 - frozen


def current() -> Context:
    """Return the context of the work at hand: one process and no limit, unless a caller set one."""
    return _current.get()


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Make `context` the current one inside this block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def workers() -> ThreadPoolExecutor:
    """Return a pool of as many threads as torch uses.

    Each runs torch single-threaded: one factorisation is too small to split further.
    """
    return _pool(max(1, torch.get_num_threads()), os.getpid())


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # A forked child inherits the pool without its threads, so the process id is in the key.
    return ThreadPoolExecutor(
        threads, thread_name_prefix="lobs", initializer=torch.set_num_threads, initargs=(1,)
    )


_lock = RLock()  # a job may call another one in its own thread


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread of the process has a job, and run this block as the only one."""
    if not _lock.acquire(blocking=False):
        logger.info("waiting for another job of this process")
        _lock.acquire()
    try:
        before = _switches()
        try:
            yield
        finally:
            _restore(before)
    finally:
        _lock.release()


def _switches() -> tuple[bool, ...]:
    backends: Any = torch.backends  # whose functions have no types
    return (
        backends.mha.get_fastpath_enabled(),
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled() if hasattr(backends.cuda, "cudnn_sdp_enabled") else True,
    )


def _restore(before: tuple[bool, ...]) -> None:
    """Restore what an interrupt may have left: Ctrl-C can arrive between a switch and its undo."""
    if _switches() == before:
        return
    fast, flash, efficient, plain, cudnn = before
    torch.backends.mha.set_fastpath_enabled(fast)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(plain)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
