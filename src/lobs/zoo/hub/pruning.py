"""`lobs.hub.prune`: a folder in, a folder out.

Where the network is a row of blocks, one block at a time is read, pruned and written. Other
networks are pruned in memory. Both ways write the same layout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lobs._system.distributed import find_group
from lobs._system.progress import shown
from lobs._system.run_log import peak_bytes
from lobs.errors import LobsError
from lobs.pruning.options import PruneOptions, check_options, option_values
from lobs.storage.shards import Shards, check_place
from lobs.targets import Target, wanted
from lobs.zoo.hub.advice import advice
from lobs.zoo.hub.headers import Names
from lobs.zoo.hub.job import Done, Job
from lobs.zoo.hub.measuring import Answers, answers, scores
from lobs.zoo.hub.places import check_out
from lobs.zoo.hub.record import CARD, HubResult, digest, write_card, write_record
from lobs.zoo.hub.rows import Prepared, Reading, prepare
from lobs.zoo.hub.source import Source, open_source
from lobs.zoo.hub.timm_source import PREFIX, named_network

if TYPE_CHECKING:
    from typing_extensions import Unpack


def prune(
    model: str | os.PathLike[str],
    data: Any,
    target: Target | None = None,
    *,
    out: str | os.PathLike[str],
    keep: float | str | Mapping[str, float | str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    reading: Reading | None = None,
    measure: bool = True,
    progress: bool = True,
    **options: Unpack[PruneOptions],
) -> HubResult:
    """Prune a folder of transformers or timm, and write a folder that loads the same way.

    Embeddings and output heads over a vocabulary stay dense, tied or not. Every other linear layer
    keeps the same share. The layers of a convolutional network share one budget.

    With `execution=Execution(distributed=True)` every process of a group makes the same call. Each
    takes its part of the batches, and the first one writes and measures.

    Args:
        model: the folder, or "timm:name" with `weights`.
        data: texts, or a path: text, JSONL, Parquet, a datasets folder, images, `.npy`. A list of
            batches works too.
        target: as for `lobs.prune`.
        out: the folder to write; it must be new or empty.
        keep: the fraction of weights to keep, in place of a target.
        weights: the safetensors file of a timm name.
        reading: length, samples, seed, field: see `Reading`.
        measure: measure the dense and the pruned network on held-out samples.
        progress: show progress on anything that takes over two seconds.
        **options: as for `lobs.prune`. Without `refit`, blocks are refitted.

    Returns:
        A `HubResult`: `.layers`, `.before`, `.after`, `.summary()`.
    """
    began = time.perf_counter()
    check_options(options)
    asked = wanted(target, keep)
    check_out(Path(out))
    group = find_group(option_values(options)[1].distributed)
    with ExitStack() as stack:
        stack.enter_context(shown(progress and group.leads))
        if str(model).startswith(PREFIX):
            model = stack.enter_context(named_network(str(model), _path(weights)))
        elif weights is not None:
            raise LobsError("weights goes with a name such as 'timm:resnet18', not with a folder.")
        source = open_source(model)
        check_place(source.folder, Path(out))
        with group.raise_together():
            read = prepare(source, data, reading or Reading())
        job = Job(source, read, asked, keep is not None, Path(out), options, progress, group)
        done = job.run()
        with group.raise_together():
            return _described(job, done, measure, began)


def _described(job: Job, done: Done, measure: bool, began: float) -> HubResult:
    """Measure both networks, and write card and record; the first process does it for all."""
    found, leads = _Measured(), job.group.leads
    if measure and leads:
        found = _measured(job.source, job.read, job.out)
    result = _result(job, done, found, time.perf_counter() - began)
    if leads:
        _describe(result, job.source, done.names)
    return result


def _result(job: Job, done: Done, found: _Measured, seconds: float) -> HubResult:
    return HubResult(
        out=job.out,
        source=job.source.folder,
        architecture=job.source.architecture,
        layers=done.layers,
        dense=done.dense,
        data=job.read.facts,
        settings=done.settings,
        before=found.before,
        after=found.after,
        notes=(
            *advice(() if "experts" in done.settings else done.layers, job.read.facts),
            *found.notes,
            *done.notes,
        ),
        seconds=seconds,
        peak_bytes=peak_bytes(),
    )


@dataclass(frozen=True)
class _Measured:
    """Metrics of both networks on held-out samples."""

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def _measured(source: Source, read: Prepared, out: Path) -> _Measured:
    """Measure both networks on held-out samples, and on as many that calibrated."""
    if not read.held_out:
        return _Measured(notes=["Not measured: no sample was held out."])
    seen = read.calibrate[: len(read.held_out)]

    def both(place: Source, label: str) -> tuple[Answers, Answers]:
        model = place.load()
        return tuple(answers(model, source, part, label) for part in (read.held_out, seen))  # type: ignore[return-value]

    dense, dense_seen = both(source, "dense network")
    small, small_seen = both(open_source(out), "pruned network")
    before, after = scores(dense, None, read.labels), scores(small, dense, read.labels)
    notes = []
    if dense.tokens:
        rise = [
            (a.loss / a.tokens - b.loss / b.tokens)
            for a, b in ((small, dense), (small_seen, dense_seen))
        ]
        notes.append(
            f"Loss rose by {rise[0]:.3f} nats on held-out samples and by {rise[1]:.3f} on samples "
            "that calibrated." + _more_data(*rise)
        )
    return _Measured(before, after, notes)


def _more_data(held_out: float, seen: float) -> str:
    """Return advice where the loss rose much more on held-out samples."""
    if held_out > 1.5 * max(seen, 0.0) + 0.02:
        return " More calibration samples would help: the weights follow those they saw."
    return ""


def _describe(result: HubResult, source: Source, names: Names) -> None:
    card = source.folder / CARD
    original = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    write_card(result, original)
    files = {file: digest(result.out / file) for file in Shards(result.out).files}
    write_record(result, files, names)


def _path(weights: str | os.PathLike[str] | None) -> Path | None:
    return None if weights is None else Path(weights)
