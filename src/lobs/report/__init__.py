"""One HTML file that shows what pruning did: no network needed to read it, nothing beside it to lose."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lobs.errors import LobsError
from lobs.storage.atomic import atomic_write

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lobs.pruning.result import PruningRecord

__all__ = ["Run", "read_run", "write_report"]


@dataclass(frozen=True, eq=False)
class Run:
    """One method's result, as a report shows it.

    `error_before` and `error_after` are the dense and the pruned network's test errors, in the unit
    that `metric` names. The rest is for pictures, and may be left out: `dense` is the network
    before (or its state dict), `pruned` the one after (a `PruningResult` has it already), `example`
    a batch of its inputs. `command` is what made this run, `note` why pictures are missing.
    """

    label: str
    pruning: PruningRecord
    error_before: float | None = None
    error_after: float | None = None
    metric: str = "test error (%)"
    dense: nn.Module | Mapping[str, Tensor] | None = None
    pruned: nn.Module | Mapping[str, Tensor] | None = None
    example: Any = None
    command: str = ""
    note: str = ""


def write_report(
    path: str | os.PathLike[str],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    seed: int | None = None,
) -> Path:
    """Write a self-contained page about one or more runs, atomically.

    Args:
        path: the file to write; its folder must exist.
        runs: the first is the main one, the others are what it is compared with.
        title: the page's heading.
        command: what to type to get these numbers again.
        seed: shown beside the command, where one was used.
    """
    if not runs:
        raise LobsError("a report needs at least one run.")
    from lobs.report.page import (
        render,
    )  # plotly and jinja2 take their time, and only a report needs them

    # Command lines may hold bytes that are not UTF-8; they are shown escaped rather than losing the
    # page.
    content = render(runs, title=title, command=command, seed=seed).encode(
        "utf-8", errors="backslashreplace"
    )
    with atomic_write(path) as partial:
        partial.write_bytes(content)
    return Path(path)


def read_run(path: str | os.PathLike[str], label: str = "") -> Run:
    """A run from a file that `PruningResult.save` or `lobs prune --out` wrote; the label is the file's name if none is given."""
    from lobs.pruning.result import PruningRecord
    from lobs.storage.checkpoint import load

    saved = load(path)
    record = saved.record

    def number(key: str) -> float | None:
        value = record.get(key)
        return float(value) if isinstance(value, int | float) else None

    return Run(
        label=label or Path(path).name.removesuffix(".safetensors"),
        pruning=PruningRecord.from_record(record, f"'{path}'"),
        error_before=number("before"),
        error_after=number("after"),
        metric=str(record.get("metric", "test error (%)")),
        pruned=saved.state_dict,
        command=str(record.get("command", "")),
    )
