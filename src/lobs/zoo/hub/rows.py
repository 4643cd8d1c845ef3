"""Turn data into a network's batches: tokens of a stated length, images, arrays.

Samples are drawn with a seed. Some are held out: nothing is fitted to them, and they measure the
pruned network. What was drawn stands in `Prepared.facts`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lobs.errors import DataError
from lobs.zoo.hub.content import Content, read_content
from lobs.zoo.hub.images import opened, prepared
from lobs.zoo.hub.source import Source
from lobs.zoo.hub.tokens import Tokens

Batch: TypeAlias = Any
_SAMPLES = {"causal": 64}  # rows of tokens; elsewhere short texts, images or arrays
_SAMPLES_ELSE = 256
_HELD_OUT = 8  # one sample for so many that calibrate
_FEWEST = 2  # samples that are held out at least
_BATCHES = 8  # batches at least, where there are enough samples
_LARGEST = 8  # samples of one batch at most


@dataclass(frozen=True)
class Reading:
    """How data are read.

    Args:
        length: tokens of one sample; 512 for decoders and 128 elsewhere, or the network's limit.
        samples: calibration samples; 64 for decoders and 256 elsewhere, or all where there are
            fewer.
        seed: of the draw.
        field: the field of JSONL and Parquet files that holds the text; "text" by default.
    """

    length: int | None = None
    samples: int | None = None
    seed: int = 0
    field: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise DataError(f"{name} is {value!r}: give a whole number from {least} on.")


@dataclass(frozen=True)
class Prepared:
    """Batches, and what they hold.

    Args:
        calibrate: the batches that calibrate, or all that judge.
        held_out: batches that nothing is fitted to.
        labels: a label of every held-out sample, in order; empty where the data have none.
        facts: where the data come from, with samples, tokens, length and seed.
    """

    calibrate: list[Batch]
    held_out: list[Batch]
    labels: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def prepare(source: Source, data: Any, reading: Reading, *, judge: bool = False) -> Prepared:
    """Read data and draw samples.

    Args:
        source: the network's folder.
        data: a path, a list of texts, or batches as for `lobs.prune`.
        reading: how.
        judge: take all samples, in order, as held-out ones; `reading.samples` limits them.
    """
    texts = isinstance(data, list | tuple) and data and all(isinstance(x, str) for x in data)
    if not isinstance(data, str | os.PathLike) and not texts:
        return _given(data, judge)
    content = read_content(data, reading.field)
    if content.kind in ("documents", "texts") and not any(text.strip() for text in content.items):
        raise DataError(f"'{content.name}' holds no text.")
    items, make = _samples(source, content, reading, judge)
    if not len(items):
        raise DataError(f"'{content.name}' holds no sample.")
    chosen, others = _drawn(len(items), source, reading, judge)
    labels = [] if content.labels is None or len(content.labels) != len(items) else _numbers(
        content.labels, source
    )  # fmt: skip
    calibrate, held_out = (_batches(items, some, make) for some in (chosen, others))
    facts = {
        "data": content.name,
        "samples": len(chosen) or len(others),
        "held_out": len(others),
        "tokens": sum(map(tokens_of, calibrate or held_out)),
        "seed": reading.seed,
    }
    if content.kind in ("documents", "texts"):
        facts["length"] = Tokens.length(source, reading.length)
    return Prepared(calibrate, held_out, [labels[i] for i in others] if labels else [], facts)


def tokens_of(batch: Batch) -> int:
    """Return the tokens of a batch without padding; 0 where it holds none."""
    if not isinstance(batch, dict) or "input_ids" not in batch:
        return 0
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else (mask != 0).sum())


def _given(data: Any, judge: bool) -> Prepared:
    """Take batches as they are; the last eighth of eight or more is held out."""
    if not isinstance(data, Iterable) or isinstance(data, Tensor | dict | bytes):
        raise DataError(
            f"data is a {type(data).__name__}: give a path, texts or a list of batches."
        )
    batches = list(data)
    if not batches:
        raise DataError("data is empty: give at least one batch.")
    edge = 0 if judge else len(batches) - len(batches) // _HELD_OUT
    facts = {"data": "given batches", "samples": len(batches), "held_out": len(batches) - edge,
             "tokens": sum(map(tokens_of, batches[:edge] or batches))}  # fmt: skip
    return Prepared(batches[:edge], batches[edge:], [], facts)


def _drawn(
    count: int, source: Source, reading: Reading, judge: bool
) -> tuple[list[int], list[int]]:
    """Return the numbers of the samples that calibrate and of those that are held out."""
    if judge:
        return [], list(range(count if reading.samples is None else min(count, reading.samples)))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(reading.seed)).tolist()
    wanted = reading.samples or _SAMPLES.get(source.task, _SAMPLES_ELSE)
    held = max(_FEWEST, wanted // _HELD_OUT)
    held = min(held, max(count - wanted, count // _HELD_OUT, 1 if count > 1 else 0))
    calibrate = order[: min(wanted, count - held)]
    return calibrate, order[len(calibrate) : len(calibrate) + held]


def needed(source: Source, reading: Reading, judge: bool) -> int | None:
    """Return how many samples are worth making; None stands for all."""
    if judge:
        return reading.samples
    wanted = reading.samples or _SAMPLES.get(source.task, _SAMPLES_ELSE)
    return 4 * (wanted + max(_FEWEST, wanted // _HELD_OUT))


def _samples(
    source: Source, content: Content, reading: Reading, judge: bool
) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]:
    """Return the samples and a function that makes a batch of some."""
    if content.kind in ("documents", "texts"):
        tokens = Tokens(source, reading.length)
        most = needed(source, reading, judge)
        if source.task == "causal":
            return tokens.chunks(content.items, most), tokens.packed
        texts = content.items
        if content.kind == "documents":
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        return texts, tokens.padded
    if content.kind == "images":
        return content.items, _image_batches(source)
    return content.items, _array_batches(source)


def _image_batches(source: Source) -> Callable[[list[Any]], Batch]:
    from lobs.zoo.hub.timm_source import TimmSource

    if isinstance(source, TimmSource):
        return lambda paths: prepared(paths, source.settings).to(source.dtype)
    processor = source_processor(source)

    def made(paths: list[Any]) -> Batch:
        found = processor(images=[opened(path) for path in paths], return_tensors="pt")
        return {name: _typed(value, source) for name, value in found.items()}

    return made


def source_processor(source: Source) -> Any:
    """Return the folder's image processor."""
    from lobs.zoo.hub.libraries import library, quietly

    try:
        with quietly():
            return library("transformers").AutoImageProcessor.from_pretrained(
                str(source.folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises whatever it meets
        raise DataError(
            f"'{source.folder}' holds no image processor (preprocessor_config.json): add it, or "
            f"give {source.input_name} as a .npy file."
        ) from error


def _array_batches(source: Source) -> Callable[[list[Any]], Batch]:
    from lobs.zoo.hub.timm_source import TimmSource

    name = source.input_name

    def made(arrays: list[Any]) -> Batch:
        stacked = torch.from_numpy(np.stack(arrays))
        if name == "input_ids":
            if stacked.is_floating_point():
                raise DataError(f"{source.architecture} takes tokens, not {stacked.dtype} arrays.")
            ids = stacked.long()
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return Tokens.with_decoder(source, batch)
        x = stacked.float() / 255 if stacked.dtype == torch.uint8 else stacked.float()
        if isinstance(source, TimmSource):
            return x.to(source.dtype)
        return Tokens.with_decoder(source, {name: x.to(source.dtype)})

    return made


def _typed(value: Tensor, source: Source) -> Tensor:
    return value.to(source.dtype) if value.is_floating_point() else value


def _batches(
    items: Sequence[Any], chosen: Sequence[int], make: Callable[[list[Any]], Batch]
) -> list[Batch]:
    size = max(1, min(_LARGEST, len(chosen) // _BATCHES))
    return [
        make([items[i] for i in chosen[start : start + size]])
        for start in range(0, len(chosen), size)
    ]


def _numbers(labels: Sequence[Any], source: Source) -> list[int]:
    """Return labels as class numbers: by the settings' own names, or in the names' order."""
    if all(str(label).lstrip("-").isdigit() for label in labels):
        return [int(label) for label in labels]
    known = getattr(source.settings, "label2id", None) or {}
    if all(str(label) in known for label in labels):
        return [int(known[str(label)]) for label in labels]
    names = sorted({str(label) for label in labels})
    return [names.index(str(label)) for label in labels]
