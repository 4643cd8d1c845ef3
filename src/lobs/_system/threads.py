"""The threads that rows are shared out to: started once, because a new thread costs more than a small layer."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


def workers() -> ThreadPoolExecutor:
    """As many as torch uses; each runs torch with one thread of its own, single factorisations being too small to share."""
    return _pool(max(1, torch.get_num_threads()), os.getpid())


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # A forked child inherits the pool but not its threads; hence the process in the key.
    return ThreadPoolExecutor(
        threads, thread_name_prefix="lobs", initializer=torch.set_num_threads, initargs=(1,)
    )
