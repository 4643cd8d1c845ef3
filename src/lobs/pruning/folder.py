"""`prune_folder`: a network larger than memory, from one folder of shards to another.

One block is in memory at a time, dense and pruned. A finished block is written at once. A run that
is called again takes finished blocks from the output folder and runs both networks through them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lobs._system.context import alone
from lobs._system.distributed import find_group, process_group, use_group
from lobs._system.memory import limited, spelled
from lobs._system.progress import shown
from lobs._system.run_log import peak_bytes, phase, recorded_run
from lobs.calibration.batches import Batches, guarded
from lobs.calibration.blocks.folder import FolderBlocks
from lobs.calibration.blocks.skeleton import Skeleton, bytes_of
from lobs.calibration.forward import evaluating
from lobs.errors import LobsError, TargetError, caution, warning_once
from lobs.layers import Layer
from lobs.layers.discovery import choose_layers, uncovered_weights
from lobs.pruning import feasibility
from lobs.pruning.folder_walk import FolderOptions, Need, Walk
from lobs.pruning.options import PruneOptions, check_options, option_values
from lobs.pruning.refit.blocks import BlockRefit, BlockRefits
from lobs.pruning.result import LayerResult
from lobs.pruning.summary import gain, short_table
from lobs.solvers import as_solver
from lobs.storage.run_store import fingerprint, open_run_store
from lobs.storage.shards import Shards, output_folder
from lobs.targets import Pattern, Sparsity, Target, for_layer, wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack


_MUCH = 0.05  # share of the weights that may stay dense without a warning


@dataclass(frozen=True)
class FolderResult:
    """The result of `prune_folder`.

    Args:
        out: the folder that holds the pruned network.
        layers: one row for each pruned layer. `error` is that of the layer's own problem: its
            pruned inputs against the dense network's output.
        dense: names of layers and other weights that were left as they are.
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
        lines = [gain(self.kept, self.total), *short_table(self.layers)]
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

    With `Execution(distributed=True)` each process gives its own batches, and the first one writes.

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
    data, skeleton = guarded(batches), Skeleton(model, Shards(folder))
    layers, dense = _chosen(skeleton, asked, options)
    group = find_group(asked.execution.distributed)
    with (
        alone(),
        warning_once(),
        torch.inference_mode(False),  # whose tensors can neither be written nor differentiated
        limited(asked.execution.memory_bytes, 2 * _largest(skeleton)),
        shown(progress and group.leads, steps=["prune"], layers={x.name: _cost(x) for x in layers}),
        use_group(group),
        recorded_run(asked.execution.log if group.leads else None) as log,
    ):
        walk = _walked(skeleton, data, asked, layers, out)
    return FolderResult(
        out=walk.out,
        layers=tuple(walk.rows),
        dense=tuple(dense),
        refits=tuple(walk.refits),
        found=walk.found,
        settings={"target": repr(asked.target), "solver": repr(asked.solver), "refit": asked.refit},
        seconds=time.perf_counter() - began,
        phases=log.seconds,
        peak_bytes=peak_bytes(),
    )


def _walked(
    skeleton: Skeleton,
    data: Batches,
    asked: FolderOptions,
    layers: list[Layer],
    place: str | os.PathLike[str],
) -> Walk:
    """Check memory and blocks, then prune all blocks and complete the output folder."""
    out, store_folder = Path(place), Path()
    with process_group().raise_together():
        if process_group().leads:
            resume = asked.execution.resume
            out, store_folder = output_folder(skeleton.shards.folder, place, resume)
        need = Need.of(skeleton, layers, asked)
        need.check()
    blocks = FolderBlocks(skeleton, data, hold_out=asked.refit == "blocks")
    with evaluating(skeleton.model):
        with phase("look"), process_group().raise_together():
            need.check(blocks.look(), skeleton.loaded)
        blocks.agree()
        identity = _identity(skeleton, data, asked, layers, out)
        with open_run_store(store_folder, identity) as store:
            names = [layer.name for layer in layers]
            walk = Walk(asked, blocks, names, out, store, need.reserved)
            walk.run()
            walk.complete()
    if asked.execution.resume is None and process_group().leads:
        shutil.rmtree(store_folder, ignore_errors=True)
    return walk


def _asked(
    target: Target | None,
    keep: float | str | Mapping[str, float | str] | None,
    given: PruneOptions,
) -> FolderOptions:
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
            f"{asked!r} needs all layers at once: give each layer its own target, by keep=0.5 or "
            "lobs.Sparsity(0.5, scope='layer'), or a pattern."
        )
    if numerics.prune_bias and isinstance(asked, Pattern):
        raise LobsError("prune_bias does not go with patterns, which are made of weights.")
    refit = given.get("refit") or "layers"
    if refit not in ("layers", "blocks"):
        raise LobsError(f"refit is {refit!r}: prune_folder takes 'layers' or 'blocks'.")
    if given.get("inputs") not in (None, "asymmetric"):
        raise LobsError(f"inputs is {given['inputs']!r}: prune_folder takes 'asymmetric' only.")
    if execution.diagnostics:
        raise LobsError("diagnostics=True does not go with prune_folder: leave it out.")
    solver = as_solver(given.get("solver", "auto"))
    if "curvature" in solver.needs:
        raise LobsError(f"{solver!r} needs gradients of the whole network: use solver='auto'.")
    return FolderOptions(asked, solver, refit, numerics, execution)


def _chosen(
    skeleton: Skeleton, asked: FolderOptions, given: PruneOptions
) -> tuple[list[Layer], list[str]]:
    """Return the layers to prune, which lie in the blocks, and the names of all others."""
    every = [layer.name for layer in choose_layers(skeleton.model)]
    every += uncovered_weights(skeleton.model)  # such as embeddings
    found = choose_layers(skeleton.model, given.get("layers"), given.get("skip", ()))
    starts = tuple(f"{block}." for block in skeleton.blocks)
    inside = [layer for layer in found if layer.name.startswith(starts)]
    if not inside:
        raise LobsError(
            f"'{found[0].name}' lies outside the blocks, which are all that prune_folder prunes: "
            f"name layers in '{skeleton.blocks[0]}' and the like."
        )
    outside = [layer for layer in found if not layer.name.startswith(starts)]
    _warn_of(outside, found, _heads(skeleton.model))
    feasibility.check(asked.target, skeleton.model, inside, asked.numerics.prune_bias)
    chosen = [layer for layer in inside if for_layer(asked.target, layer.name) is not None]
    names = {layer.name for layer in chosen}
    return chosen, [name for name in every if name not in names]


def _warn_of(outside: list[Layer], every: list[Layer], heads: set[str]) -> None:
    """Say that layers stay dense, where they hold much: an encoder-decoder has two rows."""
    left = [layer for layer in outside if layer.name not in heads]
    share = sum(x.weight.numel() for x in left) / sum(x.weight.numel() for x in every)
    if share > _MUCH:
        caution(
            f"{len(left)} layers with {share:.0%} of the weights lie outside the row of blocks and "
            f"stay dense, such as '{left[0].name}': lobs.prune prunes them too, in memory."
        )


def _heads(model: nn.Module) -> set[str]:
    """Return output layers over a vocabulary: they have a row for every row of an embedding."""
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, m in model.named_modules() if getattr(m, "out_features", None) in sizes}


def _largest(skeleton: Skeleton) -> int:
    """Return the bytes of the largest block."""
    return max(bytes_of(skeleton.model.get_submodule(name)) for name in skeleton.blocks)


def _cost(layer: Layer) -> float:
    return layer.weight.numel() * float(layer.columns)


def _identity(
    skeleton: Skeleton, data: Batches, asked: FolderOptions, layers: list[Layer], out: Path
) -> dict[str, str]:
    """Return what makes two calls the same run."""
    settings: dict[str, Any] = {
        "target": asked.target,
        "solver": asked.solver,
        "layers": [layer.name for layer in layers],
        "refit": asked.refit,
        "numerics": asked.numerics,
        "processes": process_group().size,
    }
    if asked.execution.memory_bytes is not None:
        settings["memory"] = asked.execution.memory_bytes
    if asked.execution.resume is not None:
        settings["out"] = str(out.resolve())
    return fingerprint(skeleton.model, data, settings, skeleton.shards.digest)
