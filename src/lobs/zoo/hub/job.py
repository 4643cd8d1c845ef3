"""One call of `lobs.hub.prune` at work: block by block where that is possible, else in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lobs._system.distributed import ProcessGroup
from lobs.calibration.blocks.skeleton import Skeleton
from lobs.errors import BlocksError, FileError
from lobs.layers.discovery import (
    choose_layers,
    find_layers,
    refused_layers,
    uncovered_weights,
)
from lobs.pruning import api
from lobs.pruning.folder import prune_folder
from lobs.pruning.options import PruneOptions
from lobs.pruning.result import LayerResult, PruningResult
from lobs.pruning.summary import experts_left
from lobs.storage.shards import copy_others
from lobs.targets import Pattern, Sparsity, Structured, Target
from lobs.zoo.hub.headers import Names, mask_headers
from lobs.zoo.hub.places import copy_folders, remove_if_empty, whole_folder
from lobs.zoo.hub.rows import Prepared
from lobs.zoo.hub.source import CONFIG, Source
from lobs.zoo.hub.timm_source import TimmSource

_OUTSIDE = 0.05  # share of the weights that may lie outside the blocks, and stay dense


@dataclass(frozen=True)
class Done:
    """What a run of a job gave.

    Args:
        layers: one row for each pruned layer.
        dense: names of weights that were left as they are.
        settings: how the result was made.
        names: names of pruned tensors in the files.
        notes: what to know about the result.
    """

    layers: tuple[LayerResult, ...]
    dense: tuple[str, ...]
    settings: dict[str, Any]
    names: Names = field(default_factory=Names)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
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

    def run(self) -> Done:
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
            remove_if_empty(self.out)

    def why_in_memory(self) -> str:
        """Return why blocks cannot be read one by one; empty where nothing is in the way."""
        uniform = isinstance(self.target, Sparsity) and (
            self.by_share or self.target.scope == "layer"
        )
        if self._takes_experts:
            return "whole experts leave it"
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

    def _streamed(self) -> Done:
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
            copy_folders(self.source.folder, self.out)
        how = {"blocks": "read one by one", "library": "transformers"}
        return Done(found.layers, found.dense, {**found.settings, **how})

    def _in_memory(self, why: str) -> Done:
        model = self.source.load()
        cache = self.source.set_cache(model, False)
        result = self._pruned(model)
        model, masks, layers = result.model, result.masks, result.layers
        if self._takes_experts:  # they are gone, and leave no zeros that masks would show
            masks, layers = {}, tuple(replace(layer, parameters={}) for layer in layers)
        self.source.set_cache(model, cache)
        names = Names()
        with self.group.raise_together():
            if self.group.leads:
                names = self._saved(model, masks)
        named = tuple(f"{layer.name}." for layer in result.layers)  # of a mixture: its experts too
        dense = [x.name for x in choose_layers(model) if not f"{x.name}.".startswith(named)]
        library = "timm" if isinstance(self.source, TimmSource) else "transformers"
        kept = {k: v for k, v in result.settings.items() if isinstance(v, str) or k == "experts"}
        settings = {**kept, "blocks": "in memory", "library": library}
        notes = [f"The network was in memory as a whole: {why}."]
        if self._takes_experts:
            notes.insert(0, experts_left(result.settings["experts"]))
        return Done(layers, (*dense, *uncovered_weights(model)), settings, names, notes)

    def _pruned(self, model: nn.Module) -> PruningResult:
        """Prune the network in memory; where experts leave it, the result is another network."""
        options: dict[str, Any] = {**self.options}
        target = self.target
        if not self._takes_experts:
            skip = self.options.get("skip", ())
            options["skip"] = [*([skip] if isinstance(skip, str) else skip), *_left_dense(model)]
            target = target if _mostly_convolutions(model) else self._layerwise()
        calibrate, held_out = self.share
        return api.prune(
            model,
            calibrate,
            target,
            held_out=held_out if self.read.held_out else None,  # a process's share may be empty
            inplace=not self._takes_experts,
            progress=self.progress,
            **options,
        )

    @property
    def _takes_experts(self) -> bool:
        return isinstance(self.target, Pattern) and self.target.takes_experts

    def _saved(self, model: nn.Module, masks: Mapping[str, Tensor]) -> Names:
        """Write the folder; return the names of pruned tensors in its files."""
        with whole_folder(self.out) as partial:
            self.source.save(model, partial)
            names = mask_headers(self.source, model, partial, masks)
            # Where experts have left, the settings that were just saved say how many there are.
            copy_others(self.source.folder, partial, [CONFIG] if self._takes_experts else ())
            copy_folders(self.source.folder, partial)
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
