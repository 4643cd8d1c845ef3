"""`prune_folder`: a network larger than memory, from one folder of shards to another.

One block is in memory at a time, dense and pruned. A finished block is written at once. A run that
is called again takes finished blocks from the output folder and runs both networks through them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lobs._system import memory
from lobs._system.memory import limited, spelled
from lobs._system.progress import shown
from lobs._system.run_log import log_event, peak_bytes, phase, recorded_run
from lobs.calibration.batches import Batches, guarded
from lobs.calibration.blocks import Repeated, layers_of
from lobs.calibration.blocks.folder import FolderBlocks
from lobs.calibration.blocks.skeleton import Skeleton, bytes_of
from lobs.calibration.forward import evaluating
from lobs.calibration.layer_problem import asymmetric_problem, layer_problem
from lobs.calibration.moments import PairedMoments
from lobs.errors import LobsError, TargetError, caution, warning_once
from lobs.layers import Layer
from lobs.layers.discovery import choose_layers
from lobs.pruning import feasibility
from lobs.pruning.finished import FinishedLayer
from lobs.pruning.forecast import solving_bytes
from lobs.pruning.options import Execution, Numerics, PruneOptions, check_options, option_values
from lobs.pruning.refit.blocks import BlockRefit, BlockRefits, refit_block
from lobs.pruning.result import LayerResult
from lobs.pruning.summary import gain, table
from lobs.solvers import as_solver, solve
from lobs.solvers.checks import check_finite
from lobs.solvers.masks import joined
from lobs.solvers.problem import Solver
from lobs.storage.run_store import RunStore, fingerprint, open_run_store
from lobs.storage.shards import Shards, copy_others, output_folder, write_index, write_shard
from lobs.targets import Pattern, Sparsity, Target, for_layer, wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFIT_BYTES = 20  # of every weight of a block that is refitted: copy, gradient, Adam's two, best
_SLACK, _MARGIN = 1.02, 1.05  # relative error of the need, and what a message adds to it


@dataclass(frozen=True)
class FolderResult:
    """The result of `prune_folder`.

    Args:
        out: the folder that holds the pruned network.
        layers: one row for each pruned layer. `error` is that of the layer's own problem: its
            pruned inputs against the dense network's output.
        dense: names of layers that were left as they are.
        refits: the effect of refitting each block; empty with `refit="layers"`.
        found: number of blocks that an earlier, interrupted call had finished.
        settings: how the result was made.
        seconds: how long this call took.
        phases: seconds by phase.
        peak_bytes: largest resident memory of this process; None where the system hides it.
    """

    out: Path
    layers: tuple[LayerResult, ...]
    dense: tuple[str, ...]
    refits: tuple[BlockRefit, ...]
    found: int
    settings: Mapping[str, Any]
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict, repr=False)
    peak_bytes: int | None = None

    @property
    def kept(self) -> int:
        """Weights kept in the pruned layers."""
        return sum(layer.kept for layer in self.layers)

    @property
    def total(self) -> int:
        """Weights of the pruned layers."""
        return sum(layer.total for layer in self.layers)

    def summary(self) -> str:
        """Return the gain, a table of layers, and a line for everything else that is known."""
        lines = [gain(self.kept, self.total), *table(self.layers)]
        if self.dense:
            lines.append(f"Left dense: {', '.join(self.dense)}.")
        if self.refits:
            lines.append(f"Refit: {BlockRefits(self.refits)}.")
        if self.found:
            lines.append(f"Taken from an interrupted run: {self.found} blocks.")
        peak = "" if self.peak_bytes is None else f"; at most {spelled(self.peak_bytes)} of memory"
        lines.append(f"Time: {self.seconds:.1f} seconds{peak}. Written to '{self.out}'.")
        return "\n".join(lines)


def prune_folder(
    model: nn.Module | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    batches: Iterable[Any],
    target: Target | None = None,
    *,
    out: str | os.PathLike[str],
    keep: float | str | Mapping[str, float | str] | None = None,
    progress: bool = True,
    **options: Unpack[PruneOptions],
) -> FolderResult:
    """Prune a network that lies in a folder of safetensors shards, block by block.

    Memory holds two blocks, one boundary of activations and the widest layer's matrices. Call again
    with the same arguments after an interruption: finished blocks are taken from `out`, and the
    final bits are those of an uninterrupted run. Layers outside the blocks stay dense.

    Args:
        model: the network's module on the meta device, or a function that builds it. With a
            function, parameters never take memory, and buffers keep their values.
        folder: holds `model.safetensors`, or several shards and `model.safetensors.index.json`.
        batches: the calibration data, as for `prune`.
        target: `NByM`, `Block`, `Structured`, or a `Sparsity` with `scope="layer"`.
        out: the folder to write: a shard for each block, one or more for the rest, the index last,
            and copies of files that hold no weights.
        keep: the fraction of each layer to keep, in place of a target.
        progress: show progress on anything that takes over two seconds.
        **options: as for `prune`. `inputs` is "asymmetric", `refit` "layers" (default) or "blocks".

    Returns:
        A `FolderResult`: `.layers`, `.dense`, `.refits`, `.peak_bytes`, `.summary()`.
    """
    began = time.perf_counter()
    asked = _asked(target, keep, options)
    data, shards = guarded(batches), Shards(folder)
    skeleton = Skeleton(model, shards)
    layers, dense = _chosen(skeleton, asked, options)
    target_folder, store_folder = output_folder(shards.folder, out, asked.execution.resume)
    execution = asked.execution
    blocks = [bytes_of(skeleton.model.get_submodule(name)) for name in skeleton.blocks]
    with (
        warning_once(),
        limited(execution.memory_bytes, 2 * max(blocks)),
        shown(progress, steps=["prune"], layers={n: _cost(layer) for n, layer in layers.items()}),
        recorded_run(execution.log) as log,
    ):
        need = _Need.of(skeleton, list(layers.values()), asked)
        need.check()
        identity = _identity(skeleton, data, asked, list(layers), target_folder)
        with open_run_store(store_folder, identity) as store, evaluating(skeleton.model):
            walk = _Walk(asked, skeleton, data, list(layers), target_folder, store, need)
            walk.run()
            _complete(walk)
        if execution.resume is None:
            shutil.rmtree(store_folder)
        phases = log.seconds
    return FolderResult(
        out=target_folder,
        layers=tuple(walk.rows),
        dense=tuple(dense),
        refits=tuple(walk.refits),
        found=walk.found,
        settings={"target": repr(asked.target), "solver": repr(asked.solver), "refit": asked.refit},
        seconds=time.perf_counter() - began,
        phases=phases,
        peak_bytes=peak_bytes(),
    )


@dataclass(frozen=True)
class _Asked:
    """One call's options, checked and completed."""

    target: Target
    solver: Solver
    refit: str
    numerics: Numerics
    execution: Execution


def _asked(
    target: Target | None,
    keep: float | str | Mapping[str, float | str] | None,
    given: PruneOptions,
) -> _Asked:
    """Return the completed options; refuse what cannot be done block by block."""
    check_options(given)
    numerics, execution = option_values(given)
    asked = wanted(target, keep)
    if keep is not None and isinstance(asked, Sparsity):
        asked = Sparsity(asked.fraction, scope="layer")
    if not isinstance(asked, Pattern) and not (
        isinstance(asked, Sparsity) and asked.scope == "layer"
    ):
        raise TargetError(
            f"{asked!r} needs all layers at once: give each layer its own target, by keep=0.5, "
            "lobs.Sparsity(0.5, scope='layer') or lobs.NByM(2, 4)."
        )
    if numerics.prune_bias and isinstance(asked, Pattern):
        raise LobsError("prune_bias does not go with patterns, which are made of weights.")
    refit = given.get("refit") or "layers"
    if refit not in ("layers", "blocks"):
        raise LobsError(f"refit is {refit!r}: prune_folder takes 'layers' or 'blocks'.")
    if given.get("inputs") not in (None, "asymmetric"):
        raise LobsError(f"inputs is {given['inputs']!r}: prune_folder takes 'asymmetric' only.")
    for name in ("distributed", "diagnostics"):
        if getattr(execution, name):
            raise LobsError(f"{name}=True does not go with prune_folder: leave it out.")
    solver = as_solver(given.get("solver", "auto"))
    if "curvature" in solver.needs:
        raise LobsError(f"{solver!r} needs gradients of the whole network: use solver='auto'.")
    return _Asked(asked, solver, refit, numerics, execution)


def _chosen(
    skeleton: Skeleton, asked: _Asked, given: PruneOptions
) -> tuple[dict[str, Layer], list[str]]:
    """Return the layers to prune, which lie in the blocks, and the names of all others."""
    every = [layer.name for layer in choose_layers(skeleton.model)]
    found = choose_layers(skeleton.model, given.get("layers"), given.get("skip", ()))
    starts = tuple(f"{block}." for block in skeleton.blocks)
    inside = [layer for layer in found if layer.name.startswith(starts)]
    if not inside:
        raise LobsError(
            f"'{found[0].name}' lies outside the blocks, which are all that prune_folder prunes: "
            f"name layers in '{skeleton.blocks[0]}' and the like."
        )
    feasibility.check(asked.target, skeleton.model, inside, asked.numerics.prune_bias)
    chosen = {x.name: x for x in inside if for_layer(asked.target, x.name) is not None}
    return chosen, [name for name in every if name not in chosen]


def _cost(layer: Layer) -> float:
    return layer.weight.numel() * float(layer.columns)


def _identity(
    skeleton: Skeleton, data: Batches, asked: _Asked, layers: list[str], out: Path
) -> dict[str, str]:
    """Return what makes two calls the same run."""
    settings: dict[str, Any] = {
        "target": asked.target,
        "solver": asked.solver,
        "layers": layers,
        "refit": asked.refit,
        "numerics": asked.numerics,
    }
    if asked.execution.memory_bytes is not None:
        settings["memory"] = asked.execution.memory_bytes
    if asked.execution.resume is not None:
        settings["out"] = str(out.resolve())
    return fingerprint(skeleton.model, data, settings, skeleton.shards.digest)


@dataclass(frozen=True)
class _Need:
    """Bytes that the run takes beside what is resident when it begins."""

    resident: int
    blocks: int  # two blocks
    layer: int  # the widest layer's matrices, or a block's refit
    widest: str
    outside: int  # what is read to reach the first block

    @classmethod
    def of(cls, skeleton: Skeleton, layers: Sequence[Layer], asked: _Asked) -> _Need:
        """Return what shapes alone tell."""
        modules = [skeleton.model.get_submodule(name) for name in skeleton.blocks]
        damped = asked.numerics.damping is not None
        needs = {
            x.name: solving_bytes(x, asked.solver, sequential=True, damped=damped) for x in layers
        }
        widest = max(needs, key=lambda name: needs[name])
        refit = 0
        if asked.refit == "blocks":
            refit = max(sum(p.numel() for p in m.parameters()) for m in modules) * _REFIT_BYTES
        starts = tuple(f"{block}." for block in skeleton.blocks)
        entries = skeleton.shards.entries
        largest = max((e.bytes for n, e in entries.items() if not n.startswith(starts)), default=0)
        two = 2 * max(map(bytes_of, modules))
        return cls(memory.resident(), two, max(needs[widest], refit), widest, 2 * largest)

    @property
    def reserved(self) -> int:
        """Bytes for the work on a block."""
        return self.blocks + self.layer

    def check(self, activations: int = 0) -> None:
        """Refuse a limit that is too small.

        Args:
            activations: bytes of one batch's activations, once they are known.
        """
        limit = memory.limit()
        if limit is None:
            return
        needed = self.resident + activations + max(self.reserved, self.outside)
        if needed > _SLACK * limit:
            raise LobsError(
                f"memory={spelled(limit)} is not enough: {spelled(self.resident)} is in use, two "
                f"blocks take {spelled(self.blocks)}, layer '{self.widest}' {spelled(self.layer)}, "
                f"tensors outside the blocks {spelled(self.outside)} and a batch "
                f"{spelled(activations)}. Allow {spelled(_MARGIN * needed)}."
            )


@dataclass
class _Walk:
    """A run over the blocks."""

    asked: _Asked
    skeleton: Skeleton
    batches: Batches
    names: list[str]  # of the layers to prune
    out: Path
    store: RunStore
    need: _Need
    rows: list[LayerResult] = field(default_factory=list)
    refits: list[BlockRefit] = field(default_factory=list)
    found: int = 0

    def run(self) -> None:
        """Prune block after block; take those that are finished from the output folder."""
        folder = FolderBlocks(self.skeleton, self.batches, hold_out=self.asked.refit == "blocks")
        with phase("look"):
            self.need.check(folder.look())
        with phase("calibrate"):
            folder.start(self.need.reserved)
        order, shards = folder.row.blocks, self.shards
        for name in order:
            record, last = self._finished(name), name == order[-1]
            if record is None:
                record = self._prune(folder, name, last)
            else:
                self.found += 1
                if not last:
                    with phase(f"blocks of {name}"):
                        folder.pass_over(name, Shards(self.out, [shards[name]]))
            self.rows += [_row(each) for each in record["layers"]]
            self.refits += [BlockRefit(**record["refit"])] if record["refit"] else []
        folder.drop()

    @property
    def shards(self) -> dict[str, str]:
        """The shard of every block."""
        total = len(self.skeleton.blocks) + len(self.rest)
        return {b: _shard(i, total) for i, b in enumerate(self.skeleton.blocks, 1)}

    @property
    def rest(self) -> list[list[str]]:
        """Tensors outside the blocks, in shards no larger than the largest block."""
        entries, blocks = self.skeleton.shards.entries, self.skeleton.blocks
        inside = {name for block in blocks for name in self.skeleton.names_of(block)}
        most = max(self.skeleton.shards.bytes(self.skeleton.names_of(b)) for b in blocks)
        made: list[list[str]] = []
        room = -1
        for name in sorted(entries.keys() - inside):
            if entries[name].bytes > room:
                made.append([])
                room = most
            made[-1].append(name)
            room -= entries[name].bytes
        return made

    def _finished(self, name: str) -> dict[str, Any] | None:
        """Return the record of a block that is in the output folder."""
        if not (self.out / self.shards[name]).is_file():
            return None
        saved = self.store.read(f"block {name}")
        return None if saved is None else saved.record

    def _prune(self, folder: FolderBlocks, name: str, last: bool) -> dict[str, Any]:
        """Prune one block, write it, and return its record."""
        inside = [layer for layer in self.names if layer.startswith(f"{name}.")]
        block = folder.block(name, inside)
        done, masks = [], dict[str, Tensor]()
        dense = {before.name: before for before, _ in block.layers}
        for layer, moments in layers_of(block) if inside else ():
            assert moments is not None
            solved = self._solved(layer, dense[layer.name].matrix(), moments)
            layer.write(solved.solution.weight)
            if self.asked.refit == "blocks":
                masks = joined(masks, layer.masks(solved.solution.mask))
            done.append(solved.without_tensors().result(layer, None))
            log_event("layer", layer=layer.name, kept=done[-1].kept, error=done[-1].error)
        refit = self._refitted(block, masks) if inside else None
        if not last:
            block.advance()
        del block, dense
        write_shard(self.out / self.shards[name], folder.pruned(name))
        record = {"layers": [asdict(row) for row in done], "refit": refit and asdict(refit)}
        self.store.write(f"block {name}", {}, record)
        log_event("block", block=name)
        return record

    def _refitted(self, block: Repeated, masks: Mapping[str, Tensor]) -> BlockRefit | None:
        if self.asked.refit != "blocks":
            return None
        return refit_block(block, [after for _, after in block.layers], masks)

    def _solved(self, layer: Layer, dense: Tensor, moments: PairedMoments) -> FinishedLayer:
        """Solve one layer on the inputs that the pruned layers before it give."""
        numerics, began = self.asked.numerics, time.perf_counter()
        check_finite(f"layer '{layer.name}'", "weight", dense)
        other, residual = moments.held_out, moments.residual(dense)
        judge = None if other is None else (other.pruned.moment, other.residual(dense))
        problem = layer_problem(
            layer,
            dense,
            moments.pruned,
            prune_bias=numerics.prune_bias,
            damping=numerics.damping,
            overwrite=True,
        )
        problem = asymmetric_problem(problem, residual, judge)
        with phase("solve", layer=layer.name):
            solution = solve(problem, self.asked.solver, for_layer(self.asked.target, layer.name))
        return FinishedLayer(
            solution, solution.error, time.perf_counter() - began, problem.samples or 0
        )


def _complete(walk: _Walk) -> None:
    """Write what is outside the blocks, copy other files, and write the index last."""
    shards, source = walk.shards, walk.skeleton.shards
    places = {name: shards[b] for b in shards for name in walk.skeleton.names_of(b)}
    total = len(shards) + len(walk.rest)
    with phase("write"):
        for number, names in enumerate(walk.rest, len(shards) + 1):
            write_shard(walk.out / _shard(number, total), source.read(names))
            places |= dict.fromkeys(names, _shard(number, total))
        left = copy_others(source.folder, walk.out)
        write_index(walk.out, places, source.bytes(places))
    if left:
        caution(f"links and folders are not copied to '{walk.out}': {', '.join(left)}.")


def _shard(number: int, total: int) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


def _row(record: Mapping[str, Any]) -> LayerResult:
    """Restore a layer's row from JSON."""
    parameters = {name: (first, last) for name, (first, last) in record["parameters"].items()}
    return LayerResult(**{**record, "shape": tuple(record["shape"]), "parameters": parameters})
