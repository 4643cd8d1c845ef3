"""Several processes on one job, each with its own share of the data: what they must tell each other.

A `ProcessGroup` is this process's place among them. Alone, every one of its methods is the
identity, so that the code which uses it reads the same for one process as for many. Together they
talk through `torch.distributed` (gloo on CPUs), which the user or torchrun has set up. Words travel
as JSON, numbers as tensors; nothing is pickled. A process that dies breaks its connections, one
that hangs is given up on after the time-out; both end the others with a `ProcessGroupError`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed

from lobs.errors import LobsError, ProcessGroupError

TIMEOUT = 1800.0  # seconds that the others wait for a process that has gone silent
_GRACE = 5.0  # seconds more after which torch's own time-out, which says more, must have come


@dataclass(frozen=True)
class ProcessGroup:
    """This process's number among `size` that share a job."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Is this the one that writes?"""
        return self.rank == 0

    def all_reduce(self, *tensors: Tensor) -> None:
        """Make every tensor the sum of all processes' own, in place."""
        if self.size > 1:
            with _talking(self):
                for tensor in tensors:
                    distributed.all_reduce(tensor)

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sums of plain numbers over all processes."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        self.all_reduce(sums)
        return [float(x) for x in sums]

    def broadcast(self, *tensors: Tensor, by: int = 0) -> None:
        """Give all processes one's tensors, which are contiguous, in place."""
        if self.size > 1:
            with _talking(self):
                for tensor in tensors:
                    if tensor.numel():  # bytes: not every backend knows every type
                        distributed.broadcast(tensor.view(-1).view(torch.uint8), by)

    def all_gather(self, words: Any) -> list[Any]:
        """What every process says, JSON-able, in order of their numbers."""
        if self.size == 1:
            return [words]
        said = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _talking(self):
            distributed.all_gather(lengths, torch.tensor([len(said)]))
            longest = max(int(n) for n in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(said)] = said
            heard = [torch.zeros_like(padded) for _ in range(self.size)]
            distributed.all_gather(heard, padded)
        return [
            json.loads(bytes(h[: int(n)].tolist())) for h, n in zip(heard, lengths, strict=True)
        ]

    def broadcast_object(
        self, tensors: Mapping[str, Tensor] | None, words: Any = None, *, by: int = 0
    ) -> tuple[dict[str, Tensor], Any]:
        """One process's named tensors and what it says of them, on all processes; the others' own are not looked at."""
        if self.size == 1:
            return dict(tensors or {}), words
        mine = (
            {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items()}
            if self.rank == by
            else {}
        )
        forms = {
            name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in mine.items()
        }
        forms, words = self.all_gather((forms, words))[by]
        out = {
            n: mine[n] if n in mine else torch.empty(shape, dtype=getattr(torch, d))
            for n, (d, shape) in forms.items()
        }
        self.broadcast(*out.values(), by=by)
        return out, words

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Who does which of several independent pieces of work: the dearest first, each to who has least to do."""
        load, chosen = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
            chosen[index] = load.index(min(load))
            load[chosen[index]] += costs[index]
        return chosen

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """An error on any process in this block becomes an error on all, at the end of it, with the number of the one."""
        fault: Exception | None = None
        try:
            yield
        except ProcessGroupError:
            raise  # there is nobody to tell
        except Exception as error:
            if self.size == 1:
                raise
            fault = error
        told = self.all_gather(None if fault is None else str(fault))
        first = next((rank for rank, words in enumerate(told) if words is not None), None)
        if first is not None:
            raise LobsError(f"process {first} of {self.size}: {told[first]}") from fault

    def shared_rows(self, rows: int) -> Tensor:
        """Numbers of the rows that this process takes, one in every `size`."""
        return torch.arange(self.rank, rows, self.size)

    def gathered_rows(self, parts: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Tensors of all rows from each process's own `shared_rows` of them."""
        whole = [part.new_zeros(rows, *part.shape[1:]) for part in parts]
        for out, part in zip(whole, parts, strict=True):
            out[self.shared_rows(rows)] = part
        self.all_reduce(*whole)
        return whole


SINGLE_PROCESS = ProcessGroup()
_group: ContextVar[ProcessGroup] = ContextVar("lobs_group", default=SINGLE_PROCESS)


def process_group() -> ProcessGroup:
    """Those with whom the work at hand is done: nobody, unless a caller has said so."""
    return _group.get()


@contextmanager
def use_group(group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Let what runs in this block share its work with a process group."""
    token = _group.set(group)
    try:
        yield group
    finally:
        _group.reset(token)


def find_group(wanted: bool) -> ProcessGroup:
    """The process group of the process group that is set up; only this process, if that is all that is wanted."""
    if not wanted:
        return SINGLE_PROCESS
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ProcessGroupError(
            "distributed=True, but no process group is set up. Call "
            "torch.distributed.init_process_group('gloo') first, or "
            "start with torchrun."
        )
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


@contextmanager
def launched_group(timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """The process group that torchrun's environment speaks of; only this process where there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield SINGLE_PROCESS
        return
    _found(timeout)
    try:
        yield ProcessGroup(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def _found(timeout: float) -> None:
    """Find the others, in a thread that is left behind when it takes too long: gloo waits five time-outs for one that died."""
    faults: list[BaseException] = []

    def find() -> None:
        try:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except BaseException as error:
            faults.append(error)

    finder = Thread(target=find, daemon=True)
    finder.start()
    finder.join(timeout + _GRACE)
    if finder.is_alive():
        faults.append(TimeoutError("no answer"))
    if faults:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ProcessGroupError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not find the others "
            f"through {where} in "
            f"{timeout:g} seconds ({_line(faults[0])}). One of them died or cannot reach that "
            "address: start all of them again."
        ) from faults[0]


def shard(batches: Iterable[Any], among: ProcessGroup) -> list[Any]:
    """This process's batches: one in every `size`."""
    if among.size == 1:
        return list(batches)
    return [batch for index, batch in enumerate(batches) if index % among.size == among.rank]


@contextmanager
def _talking(among: ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessGroupError(
            f"process {among.rank} of {among.size} has lost another: it died, or was silent for "
            "longer than the time-out "
            f"({_line(error)}). Start again; with a folder to resume from, finished work is not "
            "repeated."
        ) from error


def _line(error: BaseException) -> str:
    # gloo begins with a place in its own source
    return re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))[:200]
