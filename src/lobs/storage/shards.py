"""Read and write a network that lies in a folder of safetensors shards, tensor by tensor.

The layout is Hugging Face's: `model.safetensors`, or several shards beside a
`model.safetensors.index.json` that names the shard of every tensor. A folder is written shard by
shard. The index comes last, so a folder without one is unfinished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from lobs.errors import FileError
from lobs.storage.atomic import atomic_write, make_folder
from lobs.storage.checkpoint import packed_masks, unpacked_masks

MASKS = "lobs.masks"  # the header's entry
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_STORE = ".lobs-run"
_SAMPLE = 4096  # bytes of every tensor that the fingerprint reads
# Other files of weights hold the dense network, so they are not copied.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies and what it is; `dtype` is None where torch has no such type."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    start: int  # bytes before the tensor in its file
    bytes: int


class Shards:
    """The tensors of a folder, by name.

    Args:
        folder: the folder; only its headers are read now.
        files: names of the shards to read; those of the index by default.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Iterable[str] | None = None) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise FileError(f"'{self.folder}' {what}: give a folder of safetensors files.")
        files, listed = _files(self.folder) if files is None else (files, None)
        self.entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in _header(self.folder / file).items():
                if listed is None or listed.get(name) == file:
                    self.entries[name] = entry
        for name in listed or ():
            if name not in self.entries:
                raise FileError(
                    f"'{self.folder / INDEX}' says that '{listed[name]}' holds '{name}', but it "  # type: ignore[index]
                    "does not. Fetch the folder again."
                )

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors on disk."""
        return sum(self.entries[name].bytes for name in names)

    def check(self, name: str, like: Tensor) -> None:
        """Refuse a tensor that is missing or differs in shape or type from the module's own."""
        entry = self.entries.get(name)
        if entry is None:
            raise FileError(
                f"'{self.folder}' holds no tensor '{name}', which the model has. Build the model "
                "from the folder's own settings."
            )
        if entry.shape != tuple(like.shape):
            raise FileError(
                f"'{name}' is {_sides(entry.shape)} in '{entry.file}' and {_sides(like.shape)} in "
                "the model. Build the model from the folder's own settings."
            )
        if entry.dtype is None:
            raise FileError(f"'{name}' in '{entry.file}' has a type that lobs does not read.")
        if entry.dtype != like.dtype:
            raise FileError(
                f"'{name}' is {_typed(entry.dtype)} in '{entry.file}' and {_typed(like.dtype)} in "
                f"the model. Build the model in {_typed(entry.dtype)}, as by "
                f"model.to({entry.dtype})."
            )

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors into memory of their own, and nothing else."""
        found: dict[str, Tensor] = {}
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        for file, inside in by_file.items():
            with _opened(self.folder / file) as shard:
                for name in inside:
                    # A copy: mapped pages would stay resident, and the file may change.
                    found[name] = shard.get_tensor(name).clone()
        return found

    @property
    def files(self) -> list[str]:
        """The shards, in order."""
        return sorted({entry.file for entry in self.entries.values()})

    def masks(self, file: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of one shard, and the masks that its header holds."""
        path = self.folder / file
        with _opened(path) as shard:
            header = shard.metadata() or {}
        tensors = self.read(name for name, entry in self.entries.items() if entry.file == file)
        return tensors, unpacked_masks(tensors, header.get(MASKS, "{}"), path)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of all names, shapes, types and the first bytes of every tensor."""
        digest = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            digest.update(f"{name}:{entry.shape}:{entry.dtype}:{entry.bytes};".encode())
            with _reading(self.folder / entry.file) as file:
                file.seek(entry.start)
                digest.update(file.read(min(_SAMPLE, entry.bytes)))
        return digest.hexdigest()


def write_shard(
    path: Path, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None
) -> None:
    """Write a shard atomically.

    Args:
        path: the file.
        tensors: its tensors, by name.
        masks: True where a weight is kept, by name. The header holds those of the tensors.
    """
    with atomic_write(path) as partial:
        plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        header = {"format": "pt"} | ({MASKS: packed_masks(plain, masks)} if masks else {})
        try:
            save_file(plain, str(partial), metadata=header)
        except safetensors.SafetensorError as error:
            raise FileError(f"cannot write '{path}': {error}.") from error


def write_index(folder: Path, places: Mapping[str, str], count: int) -> None:
    """Write the index, which makes a folder complete.

    Args:
        folder: the folder, whose shards are written.
        places: the shard of every tensor.
        count: bytes of all tensors.
    """
    text = json.dumps({"metadata": {"total_size": count}, "weight_map": dict(places)}, indent=2)
    with atomic_write(folder / INDEX) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def copy_others(source: Path, out: Path, but: Container[str] = ()) -> list[str]:
    """Copy what is not a file of weights; return names of links and folders, which are left out.

    Links into the folder itself or into the `blobs` of a Hugging Face cache are followed.

    Args:
        source: the folder to copy from.
        out: the folder to copy to.
        but: names of files that are not copied.
    """
    left = []
    homes = (source.resolve(), source.resolve().parent.parent / "blobs")
    for path in sorted(source.iterdir()):
        weights = path.suffix.lower() in _WEIGHTS or path.name.endswith(".index.json")
        if weights or path.name in but:
            continue
        near = not path.is_symlink() or path.resolve().parent in homes
        if not near or not path.is_file():
            left.append(path.name)
            continue
        with atomic_write(out / path.name) as partial:
            shutil.copyfile(path, partial)
    return left


def output_folder(
    source: Path, out: str | os.PathLike[str], store: str | os.PathLike[str] | None
) -> tuple[Path, Path]:
    """Return the output folder, made if it is missing, and the folder of its run store.

    Args:
        source: the folder that is read.
        out: the folder to write. Files in it are refused, unless the run store has begun.
        store: the folder of the run store; a hidden one in `out` by default.
    """
    target = Path(out)
    if target.is_symlink():
        raise FileError(f"out is '{target}', a link: give the folder itself.")
    check_place(source, target)
    if store is not None and Path(store).resolve() == target.resolve():
        raise FileError(
            f"resume is '{target}', the output folder: leave resume out, and the same call "
            "continues there."
        )
    make_folder(target)
    kept = target / _STORE if store is None else Path(store)
    others = sorted(path.name for path in target.iterdir() if path.name != _STORE)
    if others and not any(kept.glob("*.json")):
        raise FileError(
            f"out is '{target}', which holds '{others[0]}' and no unfinished run: give an empty or "
            "a new folder."
        )
    return target, kept


def check_place(source: Path, out: Path) -> None:
    """Refuse an output folder that is the source, or that lies in it."""
    place, own = out.resolve(), source.resolve()
    if place == own:
        raise FileError(f"out is '{out}', the source itself: give another folder.")
    if own in place.parents:
        raise FileError(f"out is '{out}', which lies in the source '{source}': give another place.")


def _files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return a folder's shards, and the shard of every tensor if an index says so."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).is_file():
            raise FileError(
                f"'{folder}' holds neither '{SINGLE}' nor '{INDEX}'. Write one of them, or fetch "
                "the folder again."
            )
        return [SINGLE], None
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert all(isinstance(part, str) for item in listed.items() for part in item)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise FileError(
            f"'{index}' is no index of shards ({type(error).__name__}). Fetch it again."
        ) from error
    files = sorted(set(listed.values()))
    for file in files:
        if Path(file).name != file or "\\" in file or not (folder / file).is_file():
            raise FileError(
                f"'{index}' names the shard {file!r}, which is not in the folder. Fetch it."
            )
    return files, listed


def _header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file."""
    with _opened(path) as shard:  # which checks that header and length agree
        names = list(shard.keys())
    with _reading(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name in names:
        first, last = header[name]["data_offsets"]
        found[name] = TensorEntry(
            path.name,
            tuple(header[name]["shape"]),
            _TYPES.get(header[name]["dtype"]),
            8 + length + first,
            last - first,
        )
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as shard:
            yield shard
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FileError(
            f"'{path}' is no whole safetensors file: {' '.join(str(error).split())}. Fetch it "
            "again."
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise FileError(f"cannot read '{path}': {error.strerror or error}.") from error


def _sides(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _typed(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
