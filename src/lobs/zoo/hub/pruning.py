"""`lobs.hub.prune`: a folder in, a folder out.

Where the network is a row of blocks, one block at a time is read, pruned and written. Other
networks are pruned in memory. Both ways write the same layout.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lobs._system.distributed import ProcessGroup, find_group
from lobs._system.progress import shown
from lobs._system.run_log import peak_bytes
from lobs.calibration.blocks.skeleton import Skeleton
from lobs.errors import BlocksError, FileError, LobsError
from lobs.layers.discovery import (
    choose_layers,
    find_layers,
    refused_layers,
    uncovered_weights,
)
from lobs.pruning import api
from lobs.pruning.folder import prune_folder
from lobs.pruning.options import PruneOptions, check_options, option_values
from lobs.pruning.result import LayerResult
from lobs.storage.shards import Shards, check_apart, copy_others
from lobs.targets import Pattern, Sparsity, Structured, Target, wanted
from lobs.zoo.hub.advice import advice
from lobs.zoo.hub.headers import mask_headers
from lobs.zoo.hub.measuring import Answers, answers, scores
from lobs.zoo.hub.record import CARD, HubResult, digest, write_card, write_record
from lobs.zoo.hub.rows import Prepared, Reading, prepare
from lobs.zoo.hub.source import Source, open_source
from lobs.zoo.hub.timm_source import PREFIX, TimmSource, named_network

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OUTSIDE = 0.05  # share of the weights that may lie outside the blocks, and stay dense


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
    _check_out(Path(out))
    group = find_group(option_values(options)[1].distributed)
    with ExitStack() as stack:
        stack.enter_context(shown(progress and group.leads))
        if str(model).startswith(PREFIX):
            model = stack.enter_context(named_network(str(model), _path(weights)))
        elif weights is not None:
            raise LobsError("weights goes with a name such as 'timm:resnet18', not with a folder.")
        source = open_source(model)
        check_apart(source.folder, Path(out))
        with group.raise_together():
            read = prepare(source, data, reading or Reading())
        job = _Job(source, read, asked, keep is not None, Path(out), options, progress, group)
        done = job.run()
        found = _Measured()
        with group.raise_together():
            if measure and group.leads:
                found = _measured(source, read, Path(out))
            result = _result(job, done, found, time.perf_counter() - began)
            if group.leads:
                _describe(result, source, done.names)
    return result


def _result(job: _Job, done: _Done, found: _Measured, seconds: float) -> HubResult:
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
        notes=(*advice(done.layers, job.read.facts), *found.notes, *done.notes),
        seconds=seconds,
        peak_bytes=peak_bytes(),
    )


@dataclass(frozen=True)
class _Measured:
    """Metrics of both networks on held-out samples."""

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Done:
    layers: tuple[LayerResult, ...]
    dense: tuple[str, ...]
    settings: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)  # in files → in the network
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Job:
    """One call, with its folder open and its data read."""

    source: Source
    read: Prepared
    target: Target
    by_share: bool  # `keep` was given, so the scope is ours to choose
    out: Path
    options: PruneOptions
    progress: bool
    group: ProcessGroup

    @property
    def share(self) -> tuple[list[Any], list[Any]]:
        """This process's batches, to calibrate and to judge: an even stretch of all."""
        rank, size = self.group.rank, self.group.size
        parts = [
            every[rank * len(every) // size : (rank + 1) * len(every) // size]
            for every in (self.read.calibrate, self.read.held_out)
        ]
        return parts[0], parts[1]

    def run(self) -> _Done:
        """Prune block by block where that is possible, else in memory."""
        try:
            why = self.why_in_memory()
            if not why:
                with suppress(BlocksError):
                    return self._streamed()
                self._clear()
            return self._in_memory(why or "its blocks do not simply follow each other")
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        if self.group.leads:
            _remove_if_empty(self.out)

    def why_in_memory(self) -> str:
        """Return why blocks cannot be read one by one; empty where nothing is in the way."""
        uniform = isinstance(self.target, Sparsity) and (
            self.by_share or self.target.scope == "layer"
        )
        if isinstance(self.source, TimmSource):
            return "it is a network of timm"
        if self.source.task == "seq2seq":
            return "an encoder and a decoder are two rows of blocks"
        if self.options.get("inputs") not in (None, "asymmetric"):
            return f"inputs is {self.options['inputs']!r}"
        if self.options.get("refit") not in (None, "layers", "blocks"):
            return f"refit is {self.options['refit']!r}"
        if not (uniform or isinstance(self.target, Pattern)):
            return "its layers share one target"
        if isinstance(self.target, Structured):
            return "a unit leaves with all that shares or reads it, in other layers too"
        try:
            skeleton = Skeleton(self.source.build, self.source.shards)
            layers = choose_layers(
                skeleton.model, self.options.get("layers"), self.options.get("skip", ())
            )
        except BlocksError:
            return "it is no row of blocks"
        except FileError:  # tensors under older names, which transformers knows
            return "its files name tensors otherwise than the network does"
        starts, heads = tuple(f"{b}." for b in skeleton.blocks), _heads(skeleton.model)
        sizes = {x.name: x.weight.numel() for x in layers if x.name not in heads}
        outside = sum(n for name, n in sizes.items() if not name.startswith(starts))
        if outside > _OUTSIDE * sum(sizes.values()):
            return "many of its layers lie outside the blocks"
        return ""

    def _streamed(self) -> _Done:
        options: dict[str, Any] = {"refit": "blocks", **self.options}
        found = prune_folder(
            self.source.build,
            self.source.folder,
            self.share[0],
            self._layerwise(),
            out=self.out,
            progress=self.progress,
            **options,
        )
        if self.group.leads:
            _copy_folders(self.source.folder, self.out)
        how = {"blocks": "read one by one", "library": "transformers"}
        return _Done(found.layers, found.dense, {**found.settings, **how})

    def _in_memory(self, why: str) -> _Done:
        model = self.source.load()
        cache = self.source.set_cache(model, False)
        skip = self.options.get("skip", ())
        skip = [*([skip] if isinstance(skip, str) else skip), *_left_dense(model)]
        options: dict[str, Any] = {**self.options, "skip": skip}
        convolutional = _mostly_convolutions(model)
        calibrate, held_out = self.share
        result = api.prune(
            model,
            calibrate,
            self.target if convolutional else self._layerwise(),
            held_out=held_out or None,
            inplace=True,
            progress=self.progress,
            **options,
        )
        self.source.set_cache(model, cache)
        names = dict[str, str]()
        with self.group.raise_together():
            if self.group.leads:
                names = self._saved(model, result.masks)
        named = {layer.name for layer in result.layers}
        dense = [x.name for x in choose_layers(model) if x.name not in named]
        library = "timm" if isinstance(self.source, TimmSource) else "transformers"
        kept = {k: v for k, v in result.settings.items() if isinstance(v, str)}
        settings = {**kept, "blocks": "in memory", "library": library}
        note = f"The network was in memory as a whole: {why}."
        return _Done(result.layers, (*dense, *uncovered_weights(model)), settings, names, [note])

    def _saved(self, model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, str]:
        """Write the folder; return names in files → in the network, where they differ."""
        with _whole_folder(self.out) as partial:
            self.source.save(model, partial)
            names = mask_headers(self.source, model, partial, masks)
            copy_others(self.source.folder, partial)
            _copy_folders(self.source.folder, partial)
        return names

    def _layerwise(self) -> Target:
        if self.by_share and isinstance(self.target, Sparsity):
            return replace(self.target, scope="layer")
        return self.target


def _heads(model: nn.Module) -> list[str]:
    """Return the names of output layers that stay dense: heads over a vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = find() if callable(find) else None
    except (NotImplementedError, AttributeError):  # networks without one
        head = None
    return [name for name, module in model.named_modules() if head is not None and module is head]


def _left_dense(model: nn.Module) -> list[str]:
    """Return the heads, and layers that cannot be written, such as parametrised ones."""
    known = {name for layer in choose_layers(model) for name in layer.names}
    return [name for name in (*_heads(model), *refused_layers(model)) if name in known]


def _mostly_convolutions(model: nn.Module) -> bool:
    sizes = {True: 0, False: 0}
    for layer in find_layers(model, None, skip=_left_dense(model)):
        sizes[layer.weight.dim() > 2] += layer.weight.numel()
    return sizes[True] > sizes[False]


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


def _describe(result: HubResult, source: Source, names: Mapping[str, str]) -> None:
    card = source.folder / CARD
    original = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    write_card(result, original)
    files = {file: digest(result.out / file) for file in Shards(result.out).files}
    write_record(result, files, names)


def _check_out(out: Path) -> None:
    """Refuse an output folder that cannot be made, before any work."""
    if out.exists() and not out.is_dir():
        raise FileError(f"out is '{out}', a file: give a new folder.")
    nearest = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise FileError(f"cannot make the folder '{out}' in '{nearest}': choose another place.")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which takes its name when the block succeeds."""
    if out.exists() and any(out.iterdir()):
        raise FileError(f"out is '{out}', which is not empty: give an empty or a new folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        _remove_if_empty(out)
        partial.rename(out)
    except OSError as error:
        raise FileError(f"cannot write '{out}': {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_folders(source: Path, out: Path) -> None:
    """Copy folders of settings, such as those of sentence-transformers; none that holds weights."""
    for path in sorted(p for p in source.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = [p for p in path.rglob("*") if p.is_file()]
        if files and all(p.suffix in (".json", ".txt", ".model") for p in files):
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _path(weights: str | os.PathLike[str] | None) -> Path | None:
    return None if weights is None else Path(weights)
