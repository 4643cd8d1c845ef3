"""Read what people have lying around: text, JSONL, Parquet, datasets folders, images, arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lobs.errors import DataError

_TEXT = {".txt", ".text", ".md", ".raw", ".tokens"}
_LINES = {".jsonl", ".ndjson"}
_TABLES = {".parquet"}
_IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
_KNOWN = _TEXT | _LINES | _TABLES | {".npy"}
_LABELS = ("label", "labels")


@dataclass(frozen=True)
class Content:
    """What a source of data holds.

    Args:
        kind: "documents" are long texts, "texts" one text a sample, "images" paths of files,
            "arrays" one array of samples.
        items: the texts, the paths, or the array.
        labels: a label of each item, where there are any: a number or a name.
        name: where the data come from.
    """

    kind: Literal["documents", "texts", "images", "arrays"]
    items: Any
    labels: Sequence[Any] | None
    name: str


def read_content(data: str | os.PathLike[str] | Sequence[str], field: str | None) -> Content:
    """Read a file, a folder, or a list of texts.

    Args:
        data: the path, or the texts.
        field: the field of JSONL and Parquet files that holds the text.
    """
    if not isinstance(data, str | os.PathLike):
        return Content("texts", list(data), None, f"{len(data):,} texts")
    path = Path(data)
    if path.is_dir():
        return _folder(path, field)
    if not path.is_file():
        raise DataError(f"there is no data '{path}': give a file, a folder or a list of texts.")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _array(path)
    if suffix in _LINES | _TABLES:
        rows = _json_rows(path) if suffix in _LINES else _parquet_rows(path)
        return _fields(rows, field, path)
    if suffix in _IMAGES or suffix in {".bin", ".arrow", ".zip", ".gz", ".safetensors", ".npz"}:
        raise DataError(
            f"'{path}' is no data that lobs reads: give text, JSONL, Parquet, .npy, or a folder of "
            "images."
        )
    return Content("documents", [_text(path)], None, path.name)


def _folder(path: Path, field: str | None) -> Content:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in path.iterdir() if (p / "state.json").is_file())
        raise DataError(f"'{path}' holds several splits ({', '.join(splits)}): name one of them.")
    if (path / "state.json").is_file():
        return _fields(_arrow_rows(path), field, path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    images = [p for p in files if p.suffix.lower() in _IMAGES]
    if images:
        homes = {p.parent for p in images}
        labels = [p.parent.name for p in images] if len(homes) > 1 else None
        return Content("images", images, labels, path.name)
    parts = [read_content(p, field) for p in files if p.suffix.lower() in _KNOWN]
    if not parts:
        raise DataError(f"'{path}' holds neither images nor text, JSONL, Parquet or .npy files.")
    if len({part.kind for part in parts}) > 1:
        raise DataError(f"'{path}' mixes {parts[0].kind} with other kinds of data: name one file.")
    if parts[0].kind == "arrays":
        return Content("arrays", np.concatenate([p.items for p in parts]), None, path.name)
    labelled = all(part.labels is not None for part in parts)
    labels = [label for part in parts for label in part.labels or ()] if labelled else None
    return Content(parts[0].kind, [x for p in parts for x in p.items], labels, path.name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' is no UTF-8 text ({type(error).__name__}).") from error


def _array(path: Path) -> Content:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' is no array that lobs reads: {error}.") from error
    if found.ndim < 2 or found.dtype.kind not in "fiub" or not len(found):
        raise DataError(
            f"'{path}' is {found.dtype} of shape {found.shape}: it must hold numbers, with one "
            "sample in each entry of its first dimension."
        )
    beside, labels = path.with_suffix(".labels.npy"), None
    if beside.is_file():
        labels = np.load(beside, allow_pickle=False).tolist()
        if len(labels) != len(found):
            raise DataError(f"'{beside}' has {len(labels)} labels for {len(found)} samples.")
    return Content("arrays", found, labels, path.name)


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"line {number} of '{path}' is no JSON: {error}.") from error
            if not isinstance(row, dict):
                raise DataError(f"line {number} of '{path}' is no mapping of fields.")
            yield row


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    _need_pyarrow()
    import pyarrow.parquet as parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are children of ValueError
        raise DataError(f"'{path}' is no whole Parquet file: {error}.") from error


def _arrow_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a folder that `datasets` has saved."""
    _need_pyarrow()
    import pyarrow

    try:
        state = json.loads(_text(path / "state.json"))
        files = [part["filename"] for part in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise DataError(f"'{path}' holds a selection of rows: call flatten_indices() first.")
        for file in files:
            if Path(file).name != file:
                raise DataError(f"'{path}' names the file {file!r} outside the folder.")
            with pyarrow.memory_map(str(path / file)) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    yield from batch.to_pylist()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{path}' is no whole datasets folder: {error}.") from error


def _need_pyarrow() -> None:
    from lobs.zoo.hub.libraries import library

    library("pyarrow")


def _fields(rows: Iterable[Mapping[str, Any]], field: str | None, path: Path) -> Content:
    """Return the texts of rows, and their labels if they have any."""
    texts: list[str] = []
    labels: list[Any] = []
    for row in rows:
        if field is None:
            strings = [name for name, value in row.items() if isinstance(value, str)]
            field = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
            if field is None:
                raise DataError(
                    f"'{path}' has the fields {', '.join(map(str, row))}: name the one that holds "
                    "the text, by --field or Reading(field=…)."
                )
        value = row.get(field)
        if not isinstance(value, str):
            raise DataError(
                f"'{path}': row {len(texts) + 1} has no text in the field '{field}'; its fields "
                f"are {', '.join(map(str, row))}."
            )
        texts.append(value)
        labels += [row[name] for name in _LABELS if name in row][:1]
    if not texts:
        raise DataError(f"'{path}' is empty.")
    whole = labels if len(labels) == len(texts) else None
    return Content("texts", texts, whole, path.name)
