"""Say which processes and how much memory the work at hand may use.

There is one current context. `use` replaces it for a block. Solvers never ask for it: the
`Problem` that they solve carries the context it was built in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from lobs._system.distributed import SINGLE_PROCESS, ProcessGroup
from lobs._system.memory import MemoryLimit, scratch


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
