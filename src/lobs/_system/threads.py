"""Keep one pool of threads for work on rows: starting a thread costs more than a small layer."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


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
