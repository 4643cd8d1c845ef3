"""The walk over a network in a folder: blocks are pruned, written and dropped one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lobs._system import memory
from lobs._system.distributed import process_group
from lobs._system.memory import spelled
from lobs._system.run_log import log_event, phase
from lobs.calibration.blocks import Repeated, layers_of
from lobs.calibration.blocks.folder import FolderBlocks
from lobs.calibration.blocks.skeleton import Skeleton, bytes_of
from lobs.calibration.layer_problem import asymmetric_problem, kept_share, layer_problem
from lobs.calibration.moments import PairedMoments
from lobs.errors import LobsError, caution
from lobs.layers import Layer
from lobs.pruning.finished import FinishedLayer
from lobs.pruning.forecast import solving_bytes
from lobs.pruning.options import Execution, Numerics
from lobs.pruning.refit.blocks import WORK_BYTES, BlockRefit, refit_block
from lobs.pruning.refit.exchange import exchange_in
from lobs.pruning.result import LayerResult
from lobs.solvers import solve
from lobs.solvers.auto import before_refit
from lobs.solvers.checks import check_finite
from lobs.solvers.problem import Solver
from lobs.solvers.solution import joined
from lobs.storage.run_store import RunStore
from lobs.storage.shards import Shards, copy_others, write_index, write_shard
from lobs.targets import Target, for_layer

_SLACK, _MARGIN = 1.02, 1.05  # relative error of the need, and what a message adds to it


@dataclass(frozen=True)
class FolderOptions:
    """One call's options, checked and completed."""

    target: Target
    solver: Solver
    refit: str
    numerics: Numerics
    execution: Execution


@dataclass(frozen=True)
class Need:
    """Bytes that the run takes beside what is resident when it begins."""

    resident: int
    blocks: int  # two blocks
    layer: int  # the widest layer's matrices, or a block's refit
    widest: str
    outside: int  # twice the largest tensor outside the blocks, which is read and written

    @classmethod
    def of(cls, skeleton: Skeleton, layers: Sequence[Layer], asked: FolderOptions) -> Need:
        """Return the need that follows from shapes alone."""
        modules = [skeleton.model.get_submodule(name) for name in skeleton.blocks]
        damped = asked.numerics.damping is not None
        needs = {
            x.name: solving_bytes(x, asked.solver, sequential=True, damped=damped) for x in layers
        }
        widest = max(needs, key=lambda name: needs[name])
        refit = 0
        if asked.refit == "blocks":
            refit = max(sum(p.numel() for p in m.parameters()) for m in modules) * WORK_BYTES
        starts = tuple(f"{block}." for block in skeleton.blocks)
        entries = skeleton.shards.entries
        largest = max((e.bytes for n, e in entries.items() if not n.startswith(starts)), default=0)
        two = 2 * max(map(bytes_of, modules))
        return cls(memory.resident(), two, max(needs[widest], refit), widest, 2 * largest)

    @property
    def reserved(self) -> int:
        """Bytes for the work on a block."""
        return self.blocks + self.layer

    def check(self, activations: int = 0, loaded: int = 0) -> None:
        """Refuse a limit that is too small.

        Args:
            activations: bytes of one batch's activations, once they are known.
            loaded: bytes that were read to reach the first block, once they are known.
        """
        limit = memory.limit()
        if limit is None:
            return
        outside = max(self.outside, loaded + self.outside // 2)
        needed = self.resident + activations + max(self.reserved, outside)
        if needed > _SLACK * limit:
            batch = f", a batch {spelled(activations)}" if activations else ""
            raise LobsError(
                f"memory={spelled(limit)} is not enough: {spelled(self.resident)} is in use, two "
                f"blocks take {spelled(self.blocks)}, layer '{self.widest}' {spelled(self.layer)}, "
                f"tensors outside the blocks up to {spelled(outside)}{batch}. Allow "
                f"{spelled(_MARGIN * needed)}."
            )


@dataclass
class Walk:
    """A run over the blocks."""

    asked: FolderOptions
    blocks: FolderBlocks
    names: list[str]  # of the layers to prune
    out: Path
    store: RunStore
    reserved: int  # bytes for the work on one block
    rows: list[LayerResult] = field(default_factory=list)
    refits: list[BlockRefit] = field(default_factory=list)
    found: int = 0

    @property
    def skeleton(self) -> Skeleton:
        """The network without weights."""
        return self.blocks.skeleton

    def run(self) -> None:
        """Prune block after block; take those that are finished from the output folder."""
        if process_group().leads:
            for rest in self.out.glob(".model-*.safetensors.*"):  # what a killed run was writing
                rest.unlink(missing_ok=True)
        with phase("calibrate"):
            self.blocks.start(self.reserved)
        order, shards = self.blocks.row.blocks, self.shards
        for name in order:
            record, last = self._finished(name), name == order[-1]
            if record is None:
                record = self._prune(name, last)
            else:
                self.found += 1
                if not last:
                    with phase(f"resume of {name}"):
                        self.blocks.pass_over(name, Shards(self.out, [shards[name]]))
            self.rows += [_row(each) for each in record["layers"]]
            self.refits += [BlockRefit(**record["refit"])] if record["refit"] else []
        self.blocks.drop()

    def complete(self) -> None:
        """Write what is outside the blocks, copy other files, and write the index last."""
        with process_group().raise_together():
            if process_group().leads:
                self._complete()

    def _complete(self) -> None:
        shards, source = self.shards, self.skeleton.shards
        places = {name: shards[b] for b in shards for name in self.skeleton.names_of(b)}
        total = len(shards) + len(self.rest)
        with phase("write"):
            for number, names in enumerate(self.rest, len(shards) + 1):
                write_shard(self.out / _shard(number, total), source.read(names))
                places |= dict.fromkeys(names, _shard(number, total))
            left = copy_others(source.folder, self.out)
            write_index(self.out, places, source.bytes(places))
        if left:
            caution(f"links and folders are not copied to '{self.out}': {', '.join(left)}.")

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
        there = (self.out / self.shards[name]).is_file()
        if not process_group().all_gather(there)[0]:
            return None
        saved = self.store.read(f"block {name}")
        return None if saved is None else saved.record

    def _prune(self, name: str, last: bool) -> dict[str, Any]:
        """Prune one block, write it, and return its record."""
        inside = [layer for layer in self.names if layer.startswith(f"{name}.")]
        block = self.blocks.block(name, inside)
        done, masks = [], dict[str, Tensor]()
        dense = {before.name: before for before, _ in block.layers}
        for layer, moments in layers_of(block) if inside else ():
            assert moments is not None
            solved = self._solved(layer, dense[layer.name].matrix(), moments)
            layer.write(solved.solution.weight)
            masks = joined(masks, layer.masks(solved.solution.mask))
            done.append(solved.without_tensors().result(layer, None))
            log_event("layer", layer=layer.name, kept=done[-1].kept, error=done[-1].error)
        refit = self._refitted(block, masks) if inside else None
        if not last:
            block.advance()
        del block, dense
        with process_group().raise_together():
            pruned = self.blocks.pruned(name)
            if process_group().leads:
                write_shard(self.out / self.shards[name], pruned, masks)
        record = {"layers": [asdict(row) for row in done], "refit": refit and asdict(refit)}
        self.store.write(f"block {name}", {}, record)
        log_event("block", block=name)
        return record

    def _refitted(self, block: Repeated, masks: dict[str, Tensor]) -> BlockRefit | None:
        """Refit a block whose layers are solved; masks of weights that changed places are written.

        Args:
            block: the block.
            masks: True where a weight is kept, by parameter name.
        """
        asked, layers = self.asked, [after for _, after in block.layers]
        if asked.refit != "blocks":
            return None
        plan = {layer.name: for_layer(asked.target, layer.name) for layer in layers}
        exchange = exchange_in(block.name, layers, plan, asked.solver, masks)
        effect = refit_block(block, layers, masks, (), exchange)
        if effect.moved:
            masks |= exchange.masks
        return effect

    def _solved(self, layer: Layer, dense: Tensor, moments: PairedMoments) -> FinishedLayer:
        """Solve one layer on the inputs that the pruned layers before it give."""
        numerics, began = self.asked.numerics, time.perf_counter()
        check_finite(f"layer '{layer.name}'", "weight", dense)
        aim = moments.aim(dense)
        problem = layer_problem(
            layer,
            dense,
            moments.pruned,
            prune_bias=numerics.prune_bias,
            damping=numerics.damping,
            overwrite=True,
        )
        target = for_layer(self.asked.target, layer.name)
        if aim is not None:
            problem = asymmetric_problem(problem, *aim, kept_share(target, problem))
        with phase("solve", layer=layer.name):
            solver = self.asked.solver
            rough = before_refit(solver) if self.asked.refit == "blocks" else solver
            solution = solve(problem, rough, target)
        done = FinishedLayer(
            solution, solution.error, time.perf_counter() - began, problem.samples or 0
        )
        group = process_group()
        if group.size == 1:
            return done
        # All processes solved the same problem. The leader's bits are taken by all.
        return FinishedLayer.unpacked(group.broadcast_object(*done.packed()), layer.weight)


def _shard(number: int, total: int) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


def _row(record: Mapping[str, Any]) -> LayerResult:
    """Restore a layer's row from JSON."""
    parameters = {name: (first, last) for name, (first, last) in record["parameters"].items()}
    return LayerResult(**{**record, "shape": tuple(record["shape"]), "parameters": parameters})
