"""Put masks into the headers of a folder that transformers has written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lobs.errors import FileError
from lobs.storage.shards import Shards, write_shard
from lobs.zoo.hub.source import Source


@dataclass(frozen=True)
class Names:
    """Names of pruned tensors in the files, where they are not those in the network.

    Args:
        same: a tensor's name → its name in the network.
        parts: the name of a tensor that was split or joined → names of those it has numbers of.
    """

    same: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)


def mask_headers(
    source: Source, model: nn.Module, folder: Path, masks: Mapping[str, Tensor]
) -> Names:
    """Write every shard anew, with the masks of its tensors in the header.

    Return `Names`.

    Args:
        source: what wrote the folder.
        model: the network.
        folder: the folder.
        masks: True where a weight is kept, by parameter name.
    """
    shards = Shards(folder)
    known = all(
        name in shards and shards.entries[name].shape == tuple(mask.shape)
        for name, mask in masks.items()
    )
    if known:
        stored, names = dict(masks), Names()
    else:
        stored, names = _stored(source, model, masks)
    for file in shards.files:
        inside = [name for name, entry in shards.entries.items() if entry.file == file]
        write_shard(folder / file, shards.read(inside), stored)
    return names


def _stored(
    source: Source, model: nn.Module, masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Names]:
    """Return the masks as tensors are stored, and their names.

    transformers stores some networks under other names, or joins and splits tensors. So numbers
    that encode the tensor and the mask go through the same conversion.
    """
    known = list(model.state_dict())
    coded = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        mask = masks.get(name)
        keep = torch.ones(tensor.shape) if mask is None else mask.to("cpu", torch.float32)
        coded[name] = keep + 2 * number
    found, names = {}, Names()
    with tempfile.TemporaryDirectory(prefix="lobs-names-") as folder:
        source.save(model, Path(folder), coded)
        shards = Shards(folder)
        for name in shards.entries:
            code = shards.read([name])[name]
            owners = code.div(2, rounding_mode="floor")
            if not len(owners.flatten()) or not any(
                known[int(i)] in masks for i in _distinct(owners)
            ):
                continue
            found[name] = (code - 2 * owners) == 1
            own = [known[int(i)] for i in _distinct(owners)]
            if len(own) == 1 and masks[own[0]].shape == code.shape:
                names.same[name] = own[0]
            else:
                names.parts[name] = own
    if not found:
        raise FileError(f"'{source.folder}': transformers stored no pruned tensor.")
    return found, names


def _distinct(values: Tensor) -> list[float]:
    return sorted(set(values.flatten().tolist()))
