"""Measure how several processes speed up calibration and pruning.

    python -m benchmarks.scale [--processes 1 2 4] [--tries 3] [--prune SOLVER]

Every process has one thread. The same batches are divided among them. The clock starts when all
processes are ready and stops when all hold the summed moments. With `--prune` it stops when all
hold the pruned network. Each number is the best of several tries; ratios are within this run.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from datetime import timedelta
from functools import partial

import torch
from torch import distributed, multiprocessing, nn

from lobs import Execution, Sparsity, collect_moments, prune
from lobs._system.distributed import SINGLE_PROCESS, ProcessGroup, shard, use_group


def network(width):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 100),
    )


def batches(width, count, size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def moments(model, data):
    return {name: m.moment.double().numpy() for name, m in collect_moments(model, data).items()}


def masks(model, data, solver, together):
    result = prune(
        model,
        data,
        Sparsity(0.5, rounds=1),
        solver=solver,
        progress=False,
        execution=Execution(distributed=together),
    )
    return {name: mask.double().numpy() for name, mask in result.masks.items()}


def timed(rank, size, port, width, count, rows, tries, solver, results):
    torch.set_num_threads(1)
    group = SINGLE_PROCESS
    if size > 1:
        store = distributed.TCPStore("127.0.0.1", port, size, rank == 0)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=900)
        )
        group = ProcessGroup(rank, size)
    work = moments if solver is None else partial(masks, solver=solver, together=size > 1)
    work(network(64), [torch.randn(80, 64)])  # import and compile first
    model, data, took = network(width), shard(batches(width, count, rows), group), float("inf")
    for _ in range(tries):
        group.sum_numbers(1.0)
        began = time.perf_counter()
        with use_group(group):
            found = work(model, data)
        took = min(took, time.perf_counter() - began)
    if rank == 0:
        results.put((took, found))
        time.sleep(0.5)  # the parent reads the queue before this process ends
    if size > 1:
        distributed.destroy_process_group()


def measured(size, *form):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=timed, args=(r, size, port, *form, results)) for r in range(size)
    ]
    for worker in workers:
        worker.start()
    found = results.get()
    for worker in workers:
        worker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument(
        "--prune", metavar="SOLVER", help="time pruning by this solver, not calibration alone"
    )
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    first = None
    for size in given.processes:
        took, found = measured(
            size, given.width, given.batches, given.rows, given.tries, given.prune
        )
        first = first or (took, found)
        distance = max(float(abs(x - first[1][n]).max() / abs(x).max()) for n, x in found.items())
        what = "masks" if given.prune else "moments"
        print(
            f"{size} processes: {took:.2f} s, {first[0] / took:.2f} times the first; {what} differ "
            f"by {distance:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
