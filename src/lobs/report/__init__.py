"""One HTML file that shows what pruning did. It needs no network and no other file."""

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

__all__ = ["Run", "read_run", "write_comparison", "write_report"]


@dataclass(frozen=True, eq=False)
class Run:
    """One method's result, as a report shows it.

    Args:
        label: the method's name on the page.
        pruning: what `prune` returned, or what was read from a file.
        error_before: the dense network's test error, in the unit that `metric` names.
        error_after: the pruned network's test error.
        metric: name of the error and its unit. Errors in "(%)" are also given as mistakes in
            10,000.
        dense: the network before pruning or its state dict, for pictures.
        pruned: the network after pruning, if `pruning` does not hold it.
        example: a batch of inputs, for pictures and for the share of equal answers.
        command: the command that made this run.
        note: why pictures are missing.
        bytes_before: size of the dense network's file; computed from its tensors by default.
        bytes_after: size of the pruned network's compact file; computed by default.
        seconds_before: time of one call of the dense network, if it was measured.
        seconds_after: time of one call of the pruned network.
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
    bytes_before: int | None = None
    bytes_after: int | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None


def write_comparison(
    path: str | os.PathLike[str],
    found: Mapping[str, Any],
    *,
    command: str,
    layers: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write a self-contained page about two networks, and return its path.

    Args:
        path: the file to write. Its folder must exist.
        found: what `lobs.hub.compare` returned.
        command: the command that gives these numbers again.
        layers: rows of the pruned folder's record: name, kept, total, relative_error.
    """
    from lobs.report.folder import render

    content = render(found, command, layers).encode("utf-8", errors="backslashreplace")
    with atomic_write(path) as partial:
        partial.write_bytes(content)
    return Path(path)


def write_report(
    path: str | os.PathLike[str],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    seed: int | None = None,
) -> Path:
    """Write a self-contained page about one or more runs, and return its path.

    The file is replaced in one step: a run that fails leaves the old page.

    Args:
        path: the file to write. Its folder must exist.
        runs: the main run first, then the runs to compare it with.
        title: the page's heading.
        command: the command that gives these numbers again.
        seed: shown beside the command, if one was used.
    """
    if not runs:
        raise LobsError(
            'a report needs at least one run, not an empty list: give [Run("name", result)].'
        )
    from lobs.report.page import render  # jinja2 and torch are slow to import

    # A command line may hold bytes that are not UTF-8. They are shown escaped.
    content = render(runs, title=title, command=command, seed=seed).encode(
        "utf-8", errors="backslashreplace"
    )
    with atomic_write(path) as partial:
        partial.write_bytes(content)
    return Path(path)


def read_run(path: str | os.PathLike[str], label: str = "") -> Run:
    """Read a run from a file that `PruningResult.save` or `lobs prune --out` wrote.

    The label is the file's name if none is given.
    """
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
