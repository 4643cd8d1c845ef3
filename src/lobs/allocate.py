"""One budget for the whole network: how many weights does each layer give?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lobs.masks import removal_order
from lobs.solvers import DeletionPath


def allocate(paths: Mapping[str, DeletionPath], count: int) -> dict[str, int]:
    """Share `count` removals among layers so that the summed, row-weighted error grows least at every step.

    Every path's keys rise along each row, so one sort across all layers is the order in which a network-wide greedy would
    take the next deletion; a layer's share is how many of its own fall before the cut. One sort of all weights.
    """
    keys = torch.cat([path.keys.flatten().cpu() for path in paths.values()])
    sizes = [path.keys.numel() for path in paths.values()]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    taken = torch.bincount(owner[removal_order(keys)[:count]], minlength=len(sizes))
    return dict(zip(paths, taken.tolist(), strict=True))
