"""Measure a network: perplexity, accuracy, and how near it is to the dense one.

Networks are measured one after the other, and small answers are kept in between. So only one of
them is in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.progress import track
from lobs.calibration.forward import call, evaluating, main_output, masks_of, positions
from lobs.errors import DataError
from lobs.zoo.hub.record import read_record
from lobs.zoo.hub.rows import Batch, Prepared, Reading, prepare
from lobs.zoo.hub.source import Source, open_source

_PIECE = 128  # positions whose probabilities are computed at a time


@dataclass
class Answers:
    """What one network gives on some batches.

    Args:
        loss: summed negative log-likelihood of the next tokens.
        tokens: number of those tokens.
        choices: the largest output at each sample or position.
        vectors: mean output features of each sample, of length one.
    """

    loss: float = 0.0
    tokens: int = 0
    choices: list[Tensor] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Return the perplexity."""
        return math.exp(min(self.loss / max(1, self.tokens), 700.0))


def answers(model: nn.Module, source: Source, batches: Sequence[Batch], label: str) -> Answers:
    """Run a network on batches.

    Args:
        model: the network.
        source: its folder.
        batches: the batches.
        label: what the progress bar says.
    """
    found = Answers()
    with evaluating(model), track(label, len(batches)) as advance:
        for batch in batches:
            for part in rows_of(batch) if source.task == "causal" else [batch]:
                add_answers(found, call(model, cacheless(part, source)), part, source)
            advance(1)
    return found


def rows_of(batch: Batch) -> Iterator[Batch]:
    """Yield the samples of a batch one by one: logits of many tokens are large."""
    if not isinstance(batch, Mapping):
        yield from ({"input_ids": row.unsqueeze(0)} for row in batch)
        return
    count = next(len(v) for v in batch.values() if isinstance(v, Tensor))
    for i in range(count):
        yield {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}


def cacheless(batch: Batch, source: Source) -> Batch:
    """Return a batch that asks for no cache of keys and values."""
    causal = isinstance(batch, Mapping) and source.task in ("causal", "seq2seq")
    return {**batch, "use_cache": False} if causal else batch


def next_tokens(batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits before each token of a row and the tokens, without padding."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))[:, 1:] != 0
    mask = mask & (batch.get("attention_mask", torch.ones_like(ids))[:, :-1] != 0)
    return logits[:, :-1][mask], ids[:, 1:][mask]


def add_answers(found: Answers, out: Any, batch: Batch, source: Source) -> None:
    """Add what a network gave on a batch.

    Args:
        found: the answers so far.
        out: the network's output.
        batch: the batch.
        source: the network's folder.
    """
    values = main_output(out)
    if values is None:
        raise DataError(f"{source.architecture} returns no floating-point output to measure.")
    if source.task == "causal":
        logits, ids = next_tokens(batch, values)
        parts = (torch.split(x, _PIECE) for x in (logits, ids))
        for piece, wanted in zip(*parts, strict=True):
            loss = nn.functional.cross_entropy(piece.float(), wanted, reduction="sum")
            found.loss += float(loss)
        found.tokens += len(ids)
        return
    mask = positions(values, masks_of(batch)) if values.dim() == 3 else None
    if hasattr(out, "logits") or source.task == "classifier":
        choice = values.argmax(dim=-1)
        found.choices.append((choice if mask is None else choice[mask]).flatten())
        return
    found.vectors.append(nn.functional.normalize(_pooled(values.float(), mask), dim=-1))


def _pooled(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return one vector for each sample: the mean over positions, without padding."""
    if values.dim() != 3:
        return values.flatten(1) if values.dim() > 1 else values.unsqueeze(0)
    if mask is None:
        return values.mean(dim=1)
    weights = mask.to(values).unsqueeze(-1)
    return (values * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


def scores(
    own: Answers, dense: Answers | None, labels: Sequence[int] = ()
) -> dict[str, float | int]:
    """Return all numbers that the answers allow; larger is better but for perplexity.

    Args:
        own: the network's answers.
        dense: those of the dense network.
        labels: the true class of every sample.
    """
    found: dict[str, float | int] = {}
    if own.tokens:
        found |= {"perplexity": own.perplexity, "tokens": own.tokens}
    choices = torch.cat(own.choices) if own.choices else None
    if choices is not None and len(labels) == len(choices):
        found["accuracy"] = float((choices == torch.tensor(labels)).double().mean())
    if dense is not None and choices is not None:
        found["agreement"] = float((choices == torch.cat(dense.choices)).double().mean())
    if dense is not None and own.vectors:
        product = torch.cat(own.vectors) * torch.cat(dense.vectors)
        found["cosine"] = float(product.sum(dim=-1).mean())
    return found


def evaluate(
    model: str | os.PathLike[str],
    data: Any,
    *,
    dense: str | os.PathLike[str] | None = None,
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Measure a folder's network: perplexity, accuracy, or the cosine with the dense network.

    Args:
        model: the folder.
        data: a path, a list of texts, or batches.
        dense: the folder of the dense network. By default the one that `model` was pruned from,
            where it still is.
        reading: length, samples, field.

    Returns:
        The metrics by name, with the tokens, the length and the samples they come from.
    """
    source = open_source(model)
    read = prepare(source, data, reading or Reading(), judge=True)
    before = None
    if source.task != "causal":
        other = dense if dense is not None else _origin(source)
        if other is not None:
            first = open_source(other)
            before = answers(first.load(), first, read.held_out, "dense network")
    own = answers(source.load(), source, read.held_out, "measure")
    found = scores(own, before, read.labels)
    if not found:
        raise DataError(
            f"the data have no labels, and '{source.folder}' does not say which network it was "
            "pruned from: add --dense FOLDER, or dense=…."
        )
    return {"model": str(model), "task": source.task, **found, **_facts(read)}


def _facts(read: Prepared) -> dict[str, Any]:
    return {k: v for k, v in read.facts.items() if k in ("data", "samples", "length")}


def _origin(source: Source) -> Path | None:
    """Return the folder that a pruned network says it came from, if it is the same still."""
    record = read_record(source.folder)
    named = record.get("source")
    if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
        return None
    return Path(named)
