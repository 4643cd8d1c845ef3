"""Take channels out of a network that no layer gives any weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lobs.calibration.channels import Channels, Cut, Removal, Sizes, observe
from lobs.errors import UnsupportedLayerError
from lobs.layers.discovery import all_layers


@dataclass(frozen=True)
class Taken:
    """Report one pass over a network.

    Attributes:
        removed: the number of channels that were removed.
        stayed: why others could not be removed.
        sizes: the sizes that have changed.
        families: the number of families of channels that could be removed together.
        kept: why units without any weight stay, where all channels of their layer must stay.
    """

    removed: int = 0
    stayed: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    families: int = 0
    kept: tuple[str, ...] = ()


def take_unread(model: nn.Module, example: Any) -> Taken:
    """Remove channels that nothing reads, in place.

    Args:
        model: the network.
        example: an input to run it on.
    """
    channels = observe(model, example)
    if channels.branches and channels.idle:
        raise UnsupportedLayerError(
            "cannot shrink this network: it takes a branch that depends on computed values, and "
            f"'{channels.idle[0]}' took no part. Another branch may read what this one does not."
        )
    cuts = []
    for family in channels.families:
        gone = family.unread.nonzero().squeeze(1)
        gone = gone[1:] if len(gone) == len(family) else gone  # one channel at least stays
        if len(gone):
            cuts.append(Cut(family, gone))
    removal = Removal(model, example, channels.families)
    failed = removal.remove(cuts)
    stayed = [f"{len(cut.gone)} channels of {_layers(cut)}: {why}" for cut, why in failed]
    removed = sum(len(cut.gone) for cut in cuts) - sum(len(cut.gone) for cut, _ in failed)
    kept = _kept(model, channels)
    return Taken(removed, tuple(stayed), removal.sizes, len(channels.families), kept)


def _layers(cut: Cut) -> str:
    """Return the layers that make the channels of a cut."""
    names = [n.rpartition(".")[0] for n, d in cut.family.slots if (n, d) not in cut.family.readers]
    return ", ".join(dict.fromkeys(names)) or "the input"


def _kept(model: nn.Module, channels: Channels) -> tuple[str, ...]:
    """Return why empty units stay, where all channels of their layer must stay."""
    reasons = []
    for layer in all_layers(model):
        empty = int((layer.unfolded(layer.weight.detach()) == 0).all(dim=-1).sum())
        part = layer.weight_part.key
        why = channels.stays.get((f"{layer.prefix}{part}", 0))
        if empty and why:
            reasons.append(f"{empty} empty units of {layer.name}: {why}")
    return tuple(reasons)
