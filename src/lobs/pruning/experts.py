"""Remove whole experts: the network that comes back is smaller, and the others make up for it.

A zero in a router does not keep tokens away from an expert. So experts leave the network at once,
with their rows of the router. What is left of each mixture is then refitted block by block, on the
tokens as they are routed now, toward the dense block's output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from lobs._system.context import alone
from lobs._system.progress import shown
from lobs._system.run_log import peak_bytes, phase, recorded_run
from lobs.calibration.batches import Batches
from lobs.calibration.blocks import Repeated, in_blocks
from lobs.calibration.comparison import Comparison
from lobs.calibration.experts import Choice, superfluous, tokens_of
from lobs.calibration.forward import learn
from lobs.certificate.bound import refuse
from lobs.certificate.certify import beside
from lobs.errors import TargetError, caution, warning_once
from lobs.layers import Layer, find_layers
from lobs.layers.hooks import nothing_left
from lobs.layers.mixtures import Mixture, mixtures, remove
from lobs.layers.untouched import buffers_kept, copied
from lobs.pruning.options import PruneOptions, check_options, option_values
from lobs.pruning.refit.blocks import BlockRefits, refit_block
from lobs.pruning.refit.whole import refit_outputs
from lobs.pruning.result import LayerResult, PruningResult
from lobs.targets import Pattern


def prune_experts(
    dense: nn.Module,
    data: Batches,
    target: Pattern,
    options: PruneOptions,
    *,
    held_out: Iterable[Any] | None = None,
    progress: bool = True,
) -> PruningResult:
    """Return a network with fewer experts.

    Args:
        dense: the network; left as it is.
        data: the calibration data.
        target: the share of experts that go.
        options: as for `prune`, of which `refit` and `execution`'s log count.
        held_out: other inputs, to measure the change of the output on them too.
        progress: show progress.
    """
    began = time.perf_counter()
    found, count = _checked(dense, target, options)
    _, execution = option_values(options)
    with (
        alone(), nothing_left(dense), warning_once(), buffers_kept(dense),
        torch.inference_mode(False), shown(progress), recorded_run(execution.log) as log,
    ):  # fmt: skip
        with phase("choose"):
            tokens = tokens_of(dense, data, found)
            chosen = {x.name: superfluous(x, tokens[x.name], count) for x in found}
        small = copied(dense)
        remove(small, {name: choice.gone for name, choice in chosen.items()})
        with phase("refit"):
            refit = _repaired(dense, small, data, options.get("refit"))
        with phase("measure"):
            comparison = Comparison(dense, small).over(data)
            reason = "experts have left the network, and the theorem compares equal layers"
            certificate = beside(refuse(reason), comparison, held_out)
    left = {x.name: x for x in mixtures(small)}
    return PruningResult(
        model=small,
        masks={n: torch.ones_like(p, dtype=torch.bool) for x in left.values()
               for n, p in x.parameters().items()},
        layers=tuple(_row(x, left[x.name], chosen[x.name]) for x in found),
        certificate=certificate,
        solutions={},
        settings=_settings(target, chosen, found, refit, comparison.samples),
        seconds=time.perf_counter() - began,
        phases=log.seconds,
        peak_bytes=peak_bytes(),
    )  # fmt: skip


def _checked(dense: nn.Module, target: Pattern, options: PruneOptions) -> tuple[list[Mixture], int]:
    """Return the mixtures and how many experts go from each; refuse what cannot be done."""
    check_options(options)
    for name in ("layers", "skip"):
        if options.get(name):
            raise TargetError(
                f"{name} does not go with what='experts': all mixtures of a network have the same "
                "number of experts."
            )
    execution = option_values(options)[1]
    for name in ("resume", "memory", "distributed"):
        if getattr(execution, name):
            raise TargetError(f"{name} does not go with what='experts' yet: leave it out.")
    if target.table is not None:
        raise TargetError("what='experts' takes one fraction, not a mapping by layer.")
    found = mixtures(dense)
    if not found:
        raise TargetError(
            "the network has no experts that lobs can take out: it looks for a module with "
            "`num_experts` and stacked weights, and a router with `top_k` beside it."
        )
    sizes = {(x.size, x.groups) for x in found}
    if len(sizes) > 1:
        raise TargetError(f"mixtures have different numbers of experts ({sorted(sizes)}).")
    (size, groups), fraction = sizes.pop(), getattr(target, target.by_layer)
    count = target.count(size // groups) * groups
    if not count:
        of = f"{groups} groups of {size // groups}" if groups > 1 else f"{size}"
        raise TargetError(f"{fraction:g} of {of} experts is none: remove more.")
    least = max(1, 2 * groups if groups > 1 else 1)  # routers judge a group by its best two
    if size - count < least:
        raise TargetError(
            f"{fraction:g} would leave {size - count} of {size} experts: keep {least} at least."
        )
    return found, count


def _repaired(
    dense: nn.Module, small: nn.Module, data: Batches, asked: str | None
) -> BlockRefits | None:
    """Refit what is left of every mixture, block by block; return what that did."""
    if asked == "layers":
        return None
    for network in (dense, small):
        learn(network, data, always=True)
    inside = [x.name.rpartition(".")[0] for x in mixtures(small)]
    theirs = {layer.name: layer for layer in find_layers(dense)}
    after = find_layers(small)
    pairs = [(theirs[x.name], x) for x in after if x.name in theirs]
    refits = []
    for block in in_blocks(dense, small, data, pairs, repeated=True):
        if isinstance(block, Repeated):
            block.layers = ()  # nobody asks for their inputs
            here = [path for path in inside if f"{path}.".startswith(f"{block.name}.")]
            if own := _within(after, here):
                refits.append(refit_block(block, own, {}))
    whole = None
    if asked == "network" or not refits:  # a network without a row of blocks is one block
        whole = refit_outputs(small, dense, data, _within(after, inside), {})
        if whole.reason and not refits:
            caution(f"the experts left were not refitted: {whole.reason}.")
    return BlockRefits(tuple(refits), whole)


def _within(layers: Sequence[Layer], paths: Sequence[str]) -> list[Layer]:
    """Return the layers whose weights lie in modules of these paths."""
    return [x for x in layers if any(n.startswith(f"{p}.") for n in x.parameters() for p in paths)]


def _row(before: Mixture, after: Mixture, choice: Choice) -> LayerResult:
    total, kept = (sum(p.numel() for p in x.parameters().values()) for x in (before, after))
    relative = (choice.error / choice.energy) ** 0.5 if choice.energy else 0.0
    own = after.parameters().items()
    return LayerResult(
        name=before.name,
        shape=(before.size, total // before.size),
        kept=kept,
        total=total,
        error=choice.error,
        relative_error=relative,
        damping=0.0,
        seconds=0.0,
        samples=choice.tokens,
        parameters={name: (0, len(p)) for name, p in own},
    )


def _settings(
    target: Pattern,
    chosen: Mapping[str, Choice],
    found: Sequence[Mixture],
    refit: BlockRefits | None,
    samples: int,
) -> dict[str, Any]:
    """Return what the result says of how it was made.

    Args:
        target: what was asked.
        chosen: the experts that went, by mixture.
        found: the mixtures, as they were.
        refit: the effect of the refit; None where none was asked.
        samples: number of calibration samples.
    """
    gone: dict[str, list[int]] = {name: choice.gone.tolist() for name, choice in chosen.items()}
    how = "layer by layer (refit='layers')" if refit is None else str(refit)
    settings = {
        "samples": samples,
        "target": repr(target),
        "experts": {"before": found[0].size, "removed": gone},
        "refit": how,
    }
    if refit is not None:
        settings["blocks"] = [asdict(block) for block in refit.blocks]
    return settings
