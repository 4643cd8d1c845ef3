"""`lobs bench`: measure whether a network runs faster here, and by how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.options import MACHINE, CodeOption, JsonOption, SubjectArgument, TrustOption
from lobs.cli.output import Column, print_json, print_table, say, working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from lobs.deploy.accelerate import Acceleration

_KINDS = ("dense", "csr", "bsr", "compiled", "shrunk")
_NO_GAIN = 1.05  # times faster; less than this is noise to a user
_HARDLY_PRUNED = 0.9  # kept fraction above which there is nothing to gain yet


def bench(
    network: SubjectArgument,
    code: CodeOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Samples per call; 1 and 64 if not given. Repeatable.",
            metavar="N",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Time to measure each layer, about.",
            metavar="S",
            rich_help_panel=MACHINE,
        ),
    ] = 0.5,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of torch and our kernels.", metavar="N", rich_help_panel=MACHINE
        ),
    ] = None,
) -> None:
    """Time every layer in every implementation, then the network dense against accelerated.

    Runs alternate, and intervals are 95 %. Where nothing is faster, the last lines say what to try.

    Example:
      lobs bench small.safetensors --batch 1 --batch 64
    """
    import torch

    from lobs.cli.export_ import take
    from lobs.cli.subject import open_subject
    from lobs.deploy.accelerate import accelerate

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with working(json):
            subject = open_subject(network, 1, trust=trust, network=code)
            first = subject.first()
            results = [
                accelerate(subject.model, take(first, n), seconds=seconds, progress=not json)
                for n in batch or [1, 64]
            ]
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    steps = next_steps(network, subject.model, results)
    if json:
        documents = [_document(done) for done in results]
        print_json({"network": network, "threads": used, "batches": documents, "next": steps})
        return
    for done in results:
        threads_used = "1 thread" if used == 1 else f"{used} threads"
        _print(f"{subject.title}, batch {done.batch}, {threads_used}", done)
    for line in steps:
        say(line)


def _print(title: str, done: Acceleration) -> None:
    kinds = [k for k in _KINDS if any(k in row.seconds for row in done.layers)]
    columns = [
        Column("layer"),
        Column("shape", 3),
        Column("kept"),
        *(Column(f"{kind} µs", 0 if kind == "dense" else 2) for kind in kinds),
        Column("fastest µs"),
        Column("chosen"),
        Column("faster"),
        Column("crossover", 1),
    ]
    rows = [
        [
            row.name,
            "×".join(map(str, row.shape)),
            f"{row.kept:.1%}",
            *(f"{row.seconds[k] * 1e6:.1f}" if k in row.seconds else "–" for k in kinds),
            f"{min(row.seconds.values()) * 1e6:.1f}",
            row.chosen,
            f"{row.gain:.2f}×",
            "–" if row.crossover is None else f"{row.crossover:.1%}",
        ]
        for row in done.layers
    ]
    print_table(title, columns, rows)
    dense, fast, gain = done.dense, done.accelerated, done.speedup
    say(f"dense        {_micro(dense)}")
    say(f"accelerated  {_micro(fast)}")
    say(f"speed-up     {gain.middle:.2f}× ({gain.low:.2f} to {gain.high:.2f}, 95 % interval)")
    say(f"{done.note}\n" if done.note else "")


def _micro(value: Any) -> str:
    low, middle, high = (1e6 * x for x in (value.low, value.middle, value.high))
    return f"{middle:,.1f} µs ({low:,.1f} to {high:,.1f})"


def next_steps(network: str, model: nn.Module, results: Sequence[Acceleration]) -> list[str]:
    """Return what to try where pruning has brought no speed; nothing where it has."""
    if any(done.speedup.middle >= _NO_GAIN for done in results):
        return []
    modules = dict(model.named_modules())
    rows = [row for row in results[0].layers if row.name in modules and "dense" in row.seconds]
    if not rows:
        return ["No speed-up: there is no Linear or Conv2d layer that lobs could replace."]
    weights = {row.name: modules[row.name].weight.numel() for row in rows}
    kept = sum(row.kept * weights[row.name] for row in rows) / sum(weights.values())
    if kept > _HARDLY_PRUNED:
        return [
            f"No speed-up: {kept:.0%} of the weights are kept. Prune first:",
            f"  lobs prune {network} --keep 10%",
        ]
    slowest = max(rows, key=lambda row: row.seconds["dense"])
    share = slowest.seconds["dense"] / sum(row.seconds["dense"] for row in rows)
    return [
        f"No speed-up, though only {kept:.1%} of all weights are kept.",
        f"'{slowest.name}' takes {share:.0%} of the time and keeps {slowest.kept:.1%}. Try one of:",
        "  prune by operations  --flops N",
        f"  limit slow layers    --keep 10% --at-most '{slowest.name}=5%'",
        "  remove whole units   --structured units --keep 50%, then lobs shrink",
    ]


def _document(done: Any) -> dict[str, Any]:
    return {
        "batch": done.batch,
        "layers": [asdict(row) for row in done.layers],
        **{name: asdict(getattr(done, name)) for name in ("dense", "accelerated", "speedup")},
        "note": done.note,
    }
