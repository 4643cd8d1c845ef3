"""Let one job of this process work at a time, and leave torch's process-wide switches as found.

Pruning and training choose torch's attention kernels, and training seeds torch's generator. Both
exist once for each process. A second job therefore waits for the first; it gives the same bits as
alone. Threads that only run networks of their own do not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from lobs._system.run_log import logger

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
