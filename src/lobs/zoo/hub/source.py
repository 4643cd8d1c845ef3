"""Open a network's folder: settings and headers are checked before anything is loaded.

No code of the folder ever runs, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import FileError
from lobs.storage.shards import Shards
from lobs.zoo.hub.libraries import library, quietly

CONFIG = "config.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.bool)  # positions and other buffers


@dataclass(frozen=True, eq=False)
class Source:
    """A folder with a network, checked.

    Args:
        folder: the folder.
        config: its `config.json`.
        shards: its tensors.
        dtype: the type of its weights.
    """

    folder: Path
    config: Mapping[str, Any]
    shards: Shards
    dtype: torch.dtype

    @property
    def architecture(self) -> str:
        """The name of the network's class."""
        return str(self.config["architectures"][0])

    @cached_property
    def settings(self) -> Any:
        """The settings, as transformers reads them."""
        transformers = library("transformers")
        try:
            with quietly():
                return transformers.AutoConfig.from_pretrained(
                    str(self.folder), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # settings may be wrong in any way
            raise FileError(_line(f"'{self.folder / CONFIG}' cannot be read", error)) from error

    @cached_property
    def network_class(self) -> Any:
        """The network's class in transformers."""
        found = getattr(library("transformers"), self.architecture, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise FileError(
                f"'{self.folder / CONFIG}' names the architecture '{self.architecture}', which "
                "this version of transformers does not have. Install one that has it."
            )
        return found

    @property
    def input_name(self) -> str:
        """The name of the network's main input."""
        return str(self.network_class.main_input_name)

    @property
    def task(self) -> str:
        """What the network does: causal, seq2seq, classifier or encoder."""
        auto = library("transformers").models.auto.modeling_auto
        if getattr(self.settings, "is_encoder_decoder", False):
            return "seq2seq"
        if self.architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return "causal"
        return "classifier" if "Classification" in self.architecture else "encoder"

    def build(self) -> nn.Module:
        """Build the network without its weights, in the types of the folder."""
        with quietly():
            model: nn.Module = self.network_class(self.settings)
        for name, parameter in model.named_parameters():
            entry = self.shards.entries.get(name)
            if entry is not None and entry.dtype in _FLOATS:
                parameter.data = parameter.data.to(entry.dtype)
        self.set_cache(model, False)  # blocks run one by one
        return model

    @staticmethod
    def set_cache(model: nn.Module, value: bool) -> bool:
        """Say whether a network keeps keys and values; return what it did before."""
        config: Any = getattr(model, "config", None)
        before = bool(getattr(config, "use_cache", False))
        if hasattr(config, "use_cache"):
            config.use_cache = value
        return before

    def load(self) -> nn.Module:
        """Load the network into memory."""
        try:
            with quietly():
                model, info = self.network_class.from_pretrained(
                    str(self.folder),
                    local_files_only=True,
                    use_safetensors=True,
                    dtype=self.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, by name
                )
        except Exception as error:  # transformers raises whatever it meets
            raise FileError(_line(f"transformers cannot load '{self.folder}'", error)) from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise FileError(
                f"'{self.folder}' holds no tensor '{missing[0]}' ({len(missing)} such), which "
                f"{self.architecture} has. Fetch the folder again."
            )
        if info.get("mismatched_keys"):
            name, stored, wanted = sorted(info["mismatched_keys"])[0]
            raise FileError(
                f"'{name}' is {tuple(stored)} in '{self.folder}' and {tuple(wanted)} by its "
                f"{CONFIG}. Fetch the folder again."
            )
        loaded: nn.Module = model.eval()
        return loaded

    def save(self, model: nn.Module, out: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a network as transformers does, in shards no larger than the source's.

        Args:
            model: the network.
            out: the folder.
            state: what to write in place of its tensors.
        """
        largest = max(sum(e.bytes for e in self.shards.entries.values() if e.file == file)
                      for file in self.shards.files)  # fmt: skip
        with quietly():
            write: Any = model.save_pretrained
            write(out, max_shard_size=max(largest, 2**20), state_dict=state)


def open_source(model: str | os.PathLike[str]) -> Source:
    """Check a folder and return it; refuse what cannot be pruned, before anything is loaded."""
    folder = Path(model)
    config = read_config(folder)
    _refuse_code(folder)
    if "quantization_config" in config:
        raise FileError(
            f"'{folder}' holds quantised weights (quantization_config in {CONFIG}): give the "
            "folder of the network before quantisation."
        )
    shards = Shards(folder)
    if "architecture" in config and "architectures" not in config:
        from lobs.zoo.hub.timm_source import TimmSource

        return TimmSource(folder, config, shards, _dtype(shards, ()))
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        raise FileError(
            f"'{folder / CONFIG}' names no architecture: write the folder by "
            "model.save_pretrained()."
        )
    source = Source(folder, config, shards, torch.float32)
    kept = _kept_in_float32(source.network_class)
    found = Source(folder, config, shards, _dtype(shards, kept))
    _ = found.settings  # which refuses settings that transformers cannot read
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `config.json`."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileError(f"'{folder}' {what}: give a folder with {CONFIG} and safetensors files.")
    if not (folder / CONFIG).is_file():
        raise FileError(
            f"'{folder}' holds no {CONFIG}: write the folder by model.save_pretrained()."
        )
    return _json(folder / CONFIG)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(_line(f"'{path}' is no JSON", error)) from error
    if not isinstance(found, dict):
        raise FileError(f"'{path}' is no mapping: write it by model.save_pretrained().")
    return found


def _refuse_code(folder: Path) -> None:
    """Refuse a folder that names code of its own."""
    for path in sorted(folder.glob("*config*.json")):
        found = _json(path)
        if any(found.get(key) for key in ("auto_map", "custom_pipelines")):
            raise FileError(
                f"'{path}' wants code of the folder to run (auto_map, trust_remote_code), which "
                "lobs never does. Build the network yourself and use lobs.prune or "
                "lobs.prune_folder."
            )


def _kept_in_float32(network: Any) -> tuple[str, ...]:
    """Return parts of names that transformers keeps in float32 whatever the network's type."""
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return tuple(part for name in lists for part in (getattr(network, name, None) or ()))


def _dtype(shards: Shards, kept: tuple[str, ...]) -> torch.dtype:
    """Return the type of a folder's weights; refuse others than floating-point, and mixtures."""
    found: dict[torch.dtype, str] = {}
    for name, entry in shards.entries.items():
        if entry.dtype in _WHOLE:
            continue
        if entry.dtype not in _FLOATS:
            raise FileError(
                f"'{name}' in '{shards.folder / entry.file}' is {entry.dtype or 'of a type'} that "
                "lobs does not prune: give the folder in float32, float16 or bfloat16."
            )
        if len(entry.shape) > 1 and not any(part in name for part in kept):
            found.setdefault(entry.dtype, name)
    if len(found) > 1:
        (one, name), (other, second) = list(found.items())[:2]
        raise FileError(
            f"'{shards.folder}' mixes types: '{name}' is {one} and '{second}' {other}. Write it in "
            "one type, as by model.to(torch.bfloat16).save_pretrained()."
        )
    return next(iter(found), torch.float32)


def _line(what: str, error: BaseException) -> str:
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"{what} ({type(error).__name__}: {text})."
