"""A timm network: a folder that timm wrote, or a name with a file of weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor, nn

from lobs.errors import FileError, LobsError
from lobs.storage.shards import SINGLE, write_shard
from lobs.zoo.hub.libraries import library
from lobs.zoo.hub.source import CONFIG, Source

PREFIX = "timm:"


class TimmSource(Source):
    """A folder in timm's layout: `config.json` names the architecture."""

    @property
    def architecture(self) -> str:
        """The name in timm."""
        return str(self.config["architecture"])

    @property
    def input_name(self) -> str:
        """Images, as for the vision networks of transformers."""
        return "pixel_values"

    @property
    def task(self) -> str:
        """Networks without classes give features."""
        return "classifier" if self.config.get("num_classes", 1) else "encoder"

    @cached_property
    def settings(self) -> Any:
        """How images are read: input_size, mean, std, crop_pct, interpolation."""
        given = self.config.get("pretrained_cfg", {})
        found: Mapping[str, Any] = library("timm").data.resolve_data_config(pretrained_cfg=given)
        return found

    def build(self) -> nn.Module:
        """Build the network with random weights."""
        timm, more = library("timm"), dict(self.config.get("model_args") or {})
        if "num_classes" in self.config:
            more["num_classes"] = self.config["num_classes"]
        try:
            model: nn.Module = timm.create_model(self.architecture, pretrained=False, **more)
        except Exception as error:  # timm raises whatever it meets
            raise LobsError(f"timm cannot build '{self.architecture}': {error}.") from error
        return model.to(self.dtype)

    def load(self) -> nn.Module:
        """Load the network into memory."""
        model = self.build()
        try:
            model.load_state_dict(self.shards.read(self.shards.entries))
        except RuntimeError as error:
            text = " ".join(str(error).split())[:300].rstrip(".")
            raise FileError(f"'{self.folder}' does not fit {self.architecture}: {text}.") from error
        return model.eval()

    def save(self, model: nn.Module, out: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write all tensors to one file."""
        found = model.state_dict() if state is None else state
        write_shard(out / SINGLE, {name: t.clone() for name, t in found.items()})


@contextmanager
def named_network(name: str, weights: str | Path | None) -> Iterator[Path]:
    """Yield a folder in timm's layout for a name and a file of weights.

    Args:
        name: such as "timm:resnet18".
        weights: a safetensors file.
    """
    if weights is None:
        raise LobsError(
            f"'{name}' is a name without weights: add weights='file.safetensors', or --weights."
        )
    path, short = Path(weights), name.removeprefix(PREFIX)
    timm = library("timm")
    if not timm.is_model(short):
        raise LobsError(f"timm has no network '{short}'. timm.list_models() has the names.")
    if not path.is_file():
        raise FileError(f"there is no file '{path}'.")
    try:
        state = load_file(str(path))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FileError(f"'{path}' is no whole safetensors file: {error}. Fetch it.") from error
    given = timm.get_pretrained_cfg(short)
    known = {} if given is None else {k: v for k, v in given.to_dict().items() if _plain(v)}
    head = state.get(f"{known.get('classifier', 'fc')}.weight")
    config: dict[str, Any] = {"architecture": short, "pretrained_cfg": known}
    if head is not None:
        config["num_classes"] = len(head)
    with tempfile.TemporaryDirectory(prefix="lobs-timm-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_shard(Path(folder) / SINGLE, state)
        yield Path(folder)


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple)
