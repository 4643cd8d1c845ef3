"""`lobs.hub.compare`: two networks side by side on one text, with what they write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.progress import track
from lobs.calibration.forward import call, evaluating, main_output, masks_of, positions
from lobs.errors import LobsError
from lobs.zoo.hub.libraries import quietly
from lobs.zoo.hub.measuring import (
    Answers,
    add_answers,
    cacheless,
    next_tokens,
    rows_of,
    scores,
)
from lobs.zoo.hub.rows import Batch, Prepared, Reading, prepare
from lobs.zoo.hub.source import Source, open_source
from lobs.zoo.hub.tasks import check_tasks, task_scores
from lobs.zoo.hub.tokens import tokenizer_of

_PIECE = 128  # positions whose probabilities are compared at a time
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 5, 16, 32


@dataclass
class _Pair:
    """Both networks, and what they have given so far."""

    small: nn.Module
    dense: nn.Module
    source: Source
    own: Answers
    other: Answers
    divergence: float = 0.0  # summed KL(dense ‖ small)
    same: int = 0
    count: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)  # of a sample: dense, small

    def add(self, batch: Batch) -> None:
        """Run both networks on one batch."""
        given = cacheless(batch, self.source)
        outs = [call(model, given) for model in (self.small, self.dense)]
        rise = []
        for found, out in zip((self.own, self.other), outs, strict=True):
            loss, tokens = found.loss, found.tokens
            add_answers(found, out, batch, self.source)
            if found.tokens > tokens:
                rise.append((found.loss - loss) / (found.tokens - tokens))
        if rise:
            self.losses.append((rise[1], rise[0]))
        if not (hasattr(outs[0], "logits") or self.source.task == "classifier"):
            return
        logits = [self._rows(out, batch) for out in outs]
        for small, dense in zip(*(torch.split(x, _PIECE) for x in logits), strict=True):
            p, q = (x.double().log_softmax(dim=-1) for x in (dense, small))
            self.divergence += float((p.exp() * (p - q)).sum())
            self.same += int((small.argmax(-1) == dense.argmax(-1)).sum())
            self.count += len(small)

    def _rows(self, out: Any, batch: Batch) -> Tensor:
        """Return one row of logits for each prediction that counts."""
        values = main_output(out)
        assert values is not None  # the answers have been added
        if self.source.task == "causal":
            return next_tokens(batch, values)[0]
        mask = positions(values, masks_of(batch)) if values.dim() == 3 else None
        return (values if mask is None else values[mask]).reshape(-1, values.shape[-1])


def compare(
    small: str | os.PathLike[str],
    dense: str | os.PathLike[str],
    data: Any,
    *,
    reading: Reading | None = None,
    prompts: Sequence[str] | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    own_tasks: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Run two folders' networks on the same data and say how far they are from each other.

    Args:
        small: the folder of the pruned network.
        dense: the folder of the dense one.
        data: a path, a list of texts, or batches.
        reading: length, samples, field.
        prompts: texts that both networks continue; by default the beginnings of five samples.
        tasks: tasks of EleutherAI's evaluation harness, which the extra `lobs[lm-eval]` brings.
        limit: samples of each task; all by default.
        own_tasks: a folder with your own task files.

    Returns:
        Metrics of both, `agreement` of the likeliest predictions, `kl` from dense to small in nats
        for each prediction, `losses` of every sample (dense, small), and `generations`. With
        `tasks` also their scores. `lobs.report.write_comparison` makes a page of it.
    """
    sources = open_source(small), open_source(dense)
    if sources[0].architecture != sources[1].architecture:
        raise LobsError(
            f"'{small}' is {sources[0].architecture} and '{dense}' {sources[1].architecture}: "
            "compare two networks of one architecture."
        )
    if tasks:
        check_tasks(sources[1], tasks)
    read = prepare(sources[1], data, reading or Reading(), judge=True)
    pair = _Pair(sources[0].load(), sources[1].load(), sources[1], Answers(), Answers())
    with (
        evaluating(pair.small),
        evaluating(pair.dense),
        track("compare", len(read.held_out)) as advance,
    ):
        for batch in read.held_out:
            for part in rows_of(batch) if pair.source.task == "causal" else [batch]:
                pair.add(part)
            advance(1)
        written = _generations(pair, read, prompts)
        scored = [
            task_scores(model, sources[1], tasks, limit=limit, own_tasks=own_tasks) if tasks else {}
            for model in (pair.small, pair.dense)
        ]
    found: dict[str, Any] = {"small": str(small), "dense": str(dense), "task": pair.source.task}
    if tasks:
        found["tasks"] = {
            task: {"small": values, "dense": scored[1].get(task, {})}
            for task, values in scored[0].items()
        }
    facts = {k: v for k, v in read.facts.items() if k in ("data", "samples", "length")}
    return {**found, **_numbers(pair, read), **facts, "generations": written}


def _numbers(pair: _Pair, read: Prepared) -> dict[str, Any]:
    """Return the metrics of both networks and how far they are from each other."""
    found: dict[str, Any] = {
        "metrics": {
            "small": scores(pair.own, None, read.labels),
            "dense": scores(pair.other, None, read.labels),
        }
    }
    found |= {k: v for k, v in scores(pair.own, pair.other).items() if k == "cosine"}
    if pair.count:
        found |= {
            "agreement": pair.same / pair.count,
            "kl": pair.divergence / pair.count,
            "predictions": pair.count,
        }
    if pair.losses:
        found["losses"] = pair.losses
    return found


def _generations(
    pair: _Pair, read: Prepared, prompts: Sequence[str] | None
) -> list[dict[str, str]]:
    """Let both networks continue some texts, without chance; empty where they write no text."""
    if pair.source.task not in ("causal", "seq2seq") or pair.source.input_name != "input_ids":
        return []
    try:
        tokenizer = tokenizer_of(pair.source)
    except LobsError:
        return []
    if prompts is None:
        rows = [row for batch in read.held_out for row in rows_of(batch)]
        step = max(1, len(rows) // _PROMPTS)
        firsts = [row["input_ids"][0, :_PROMPT_TOKENS] for row in rows[::step][:_PROMPTS]]
    else:
        firsts = [torch.tensor(tokenizer(text)["input_ids"]) for text in prompts]
    return [
        {
            "prompt": tokenizer.decode(ids, skip_special_tokens=True),
            "dense": _continued(pair.dense, ids, tokenizer, pair.source),
            "small": _continued(pair.small, ids, tokenizer, pair.source),
        }
        for ids in firsts
    ]


def _continued(model: Any, ids: Tensor, tokenizer: Any, source: Source) -> str:
    most = getattr(source.settings, "max_position_embeddings", None)
    new = _NEW_TOKENS if most is None else max(1, min(_NEW_TOKENS, most - len(ids)))
    given = ids.unsqueeze(0)
    with quietly():
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
        )[0]
    written = out[len(ids) :] if source.task == "causal" else out
    return str(tokenizer.decode(written, skip_special_tokens=True))
