"""`lobs shrink`: take what pruning left empty out of a network."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lobs.cli.common import (
    JsonOption,
    SubjectArgument,
    TrustOption,
    distinct,
    file_of,
    optional,
    print_json,
    say,
    writable,
)


def shrink(
    network: SubjectArgument,
    out: Annotated[
        Path | None, typer.Option(help="Where to save the smaller network (safetensors).")
    ] = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Remove units without weights and channels that nothing reads; outputs stay the same, and what must stay is explained.

    Example: `lobs prune lenet5 --structured units --sparsity 50% --out p.safetensors`, then
    `lobs shrink p.safetensors --out small.safetensors`, which every other command can open.
    """
    distinct(writable(out), "--out", file_of(network))

    from lobs.cli.subject import open_subject
    from lobs.deploy.shrink import shrink as run
    from lobs.errors import LobsError
    from lobs.storage import checkpoint

    subject = open_subject(network, trust=trust)
    batch = subject.first()
    example = batch[0] if isinstance(batch, tuple | list) else batch
    if isinstance(example, dict):
        raise LobsError("cannot shrink a network that is called with keyword arguments.")
    smaller, report = run(subject.model, example[:1])
    before, after = subject.score(subject.model), subject.score(smaller)
    if out is not None:
        record = {
            "network": subject.network,
            "shrunk": True,
            "shrinkage": asdict(report),
            "before": before,
            "after": after,
        }
        checkpoint.save(out, smaller, record=record)
    if json:
        written = {} if out is None else {"network": str(out)}
        print_json(
            {
                "metric": subject.metric,
                "before": before,
                "after": after,
                "shrinkage": asdict(report),
                **written,
            }
        )
        return
    say(str(report))
    if before is not None:
        say(f"{subject.metric}: {optional(before)} → {optional(after)}")
    say(
        f"network: {out}"
        if out is not None
        else "not saved: give --out FILE to keep the smaller network"
    )
