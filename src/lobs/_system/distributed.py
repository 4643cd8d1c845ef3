"""Share one job among several processes, each with its own part of the data.

A `ProcessGroup` holds this process's rank and the number of processes. With one process, each of
its methods is the identity, so callers need no second code path. Several processes communicate
through `torch.distributed` (gloo on CPUs), which the user or torchrun has initialised. Objects
travel as JSON and numbers as tensors. Nothing is pickled. When a process dies, or hangs for longer
than the time-out, the others raise a `ProcessGroupError`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed

from lobs.errors import LobsError, ProcessGroupError

TIMEOUT = 1800.0  # seconds to wait for a process that does not answer
_GRACE = 5.0  # extra seconds for torch's own time-out, whose message says more


@dataclass(frozen=True)
class ProcessGroup:
    """This process's rank among the `size` processes that share a job."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Return whether this process writes files and messages."""
        return self.rank == 0

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over all processes, in place."""
        if self.size > 1:
            with _communicating(self):
                for tensor in tensors:
                    distributed.all_reduce(tensor)

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums of plain numbers over all processes."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        self.all_reduce(sums)
        return [float(x) for x in sums]

    def broadcast(self, *tensors: Tensor, by: int = 0) -> None:
        """Copy contiguous tensors from process `by` to all processes, in place."""
        if self.size > 1:
            with _communicating(self):
                for tensor in tensors:
                    if tensor.numel():  # sent as bytes: not every backend supports every dtype
                        distributed.broadcast(tensor.view(-1).view(torch.uint8), by)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's JSON-able value, in order of rank."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _communicating(self):
            distributed.all_gather(lengths, torch.tensor([len(own)]))
            longest = max(int(n) for n in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = own
            gathered = [torch.zeros_like(padded) for _ in range(self.size)]
            distributed.all_gather(gathered, padded)
        pairs = zip(gathered, lengths, strict=True)
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in pairs]

    def broadcast_object(
        self, tensors: Mapping[str, Tensor] | None, value: Any = None, *, by: int = 0
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the named tensors and the JSON-able value of process `by`, on all processes.

        What the other processes pass is ignored.

        Args:
            tensors: named tensors; None where the process has none to send.
            value: any JSON-able object that goes with them.
            by: rank of the process that sends.
        """
        if self.size == 1:
            return dict(tensors or {}), value
        own = {}
        if self.rank == by:
            own = {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items()}
        forms = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in own.items()}
        forms, value = self.all_gather((forms, value))[by]
        out = {
            n: own[n] if n in own else torch.empty(shape, dtype=getattr(torch, d))
            for n, (d, shape) in forms.items()
        }
        self.broadcast(*out.values(), by=by)
        return out, value

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Return the rank that does each of several independent pieces of work.

        The dearest piece is dealt first, each to the process with the least work so far.
        """
        load, chosen = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
            chosen[index] = load.index(min(load))
            load[chosen[index]] += costs[index]
        return chosen

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise on all processes, at the end of this block, what any process raised inside it."""
        fault: Exception | None = None
        try:
            yield
        except ProcessGroupError:
            raise  # the other processes cannot be reached
        except Exception as error:
            if self.size == 1:
                raise
            fault = error
        messages = self.all_gather(None if fault is None else str(fault))
        first = next((rank for rank, text in enumerate(messages) if text is not None), None)
        if first is not None:
            raise LobsError(f"process {first} of {self.size}: {messages[first]}") from fault

    def shared_rows(self, rows: int) -> Tensor:
        """Return the indices of the rows that this process works on: one in every `size`."""
        return torch.arange(self.rank, rows, self.size)

    def gathered_rows(self, parts: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return tensors of all `rows` from each process's own `shared_rows`."""
        whole = [part.new_zeros(rows, *part.shape[1:]) for part in parts]
        for out, part in zip(whole, parts, strict=True):
            out[self.shared_rows(rows)] = part
        self.all_reduce(*whole)
        return whole


SINGLE_PROCESS = ProcessGroup()


def process_group() -> ProcessGroup:
    """Return the processes that share the work at hand: the current context's group."""
    from lobs._system import context  # it is built on this module

    return context.current().group


@contextmanager
def use_group(group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Share the work inside this block with a process group."""
    from lobs._system import context

    with context.use(replace(context.current(), group=group)):
        yield group


def find_group(wanted: bool) -> ProcessGroup:
    """Return the initialised process group if `wanted`, else this process alone."""
    if not wanted:
        return SINGLE_PROCESS
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ProcessGroupError(
            "distributed=True, but no process group is set up. Call "
            "torch.distributed.init_process_group('gloo') first, or start with torchrun."
        )
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


@contextmanager
def launched_group(timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """Join the process group of torchrun's environment; yield this process alone without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield SINGLE_PROCESS
        return
    _initialise(timeout)
    try:
        yield ProcessGroup(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def _initialise(timeout: float) -> None:
    """Connect to the other processes within the time-out.

    A thread does it and is abandoned when late: gloo waits five time-outs for a dead process.
    """
    faults: list[BaseException] = []

    def connect() -> None:
        try:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except BaseException as error:
            faults.append(error)

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout + _GRACE)
    if thread.is_alive():
        faults.append(TimeoutError("no answer"))
    if faults:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ProcessGroupError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not find the others "
            f"through {where} in {timeout:g} seconds ({_line(faults[0])}). "
            "One of them died or cannot reach that address: start all of them again."
        ) from faults[0]


def shard(batches: Iterable[Any], group: ProcessGroup) -> list[Any]:
    """Return this process's batches: one in every `size`."""
    if group.size == 1:
        return list(batches)
    return [batch for index, batch in enumerate(batches) if index % group.size == group.rank]


@contextmanager
def _communicating(group: ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessGroupError(
            f"process {group.rank} of {group.size} has lost another: it died, or was silent for "
            f"longer than the time-out ({_line(error)}). "
            "Start again; with a folder to resume from, finished work is not repeated."
        ) from error


def _line(error: BaseException) -> str:
    # gloo's messages begin with a position in its source
    return re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))[:200]
