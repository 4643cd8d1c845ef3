"""`lobs bench`: does it run faster here, and by how much?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from lobs.cli.common import JsonOption, SubjectArgument, TrustOption, print_json, say


def bench(
    network: SubjectArgument,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples at a time, repeatable; else 1 and 64.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Time to measure each layer, about.")
    ] = 0.5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for torch and our kernels.")
    ] = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Measure every layer every way, then the whole network dense against accelerated, in turns, with 95 % intervals.

    Example: `lobs bench small.safetensors --batch 1 --batch 64`
    """
    import torch

    from lobs.cli.export_ import take
    from lobs.cli.subject import open_subject
    from lobs.deploy.accelerate import accelerate

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        subject = open_subject(network, 1, trust=trust)
        first = subject.first()
        results = [
            accelerate(subject.model, take(first, n), seconds=seconds, progress=not json)
            for n in batch or [1, 64]
        ]
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    if json:
        print_json(
            {"network": network, "threads": used, "batches": [_document(done) for done in results]}
        )
        return
    for done in results:
        say(f"{subject.title}, batch {done.batch}, {used} threads\n{done.summary()}\n")


def _document(done: Any) -> dict[str, Any]:
    return {
        "batch": done.batch,
        "layers": [asdict(row) for row in done.layers],
        **{name: asdict(getattr(done, name)) for name in ("dense", "accelerated", "speedup")},
        "note": done.note,
    }
