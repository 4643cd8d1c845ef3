"""Scores on tasks by EleutherAI's evaluation harness, an optional library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lobs.errors import LobsError
from lobs.zoo.hub.libraries import library, quietly
from lobs.zoo.hub.source import Source
from lobs.zoo.hub.tokens import tokenizer_of

_BATCH = 8  # samples that the harness runs at once


def task_scores(
    model: Any,
    source: Source,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    own_tasks: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Return every task's metrics, by task and metric.

    Args:
        model: the network, in memory.
        source: its folder, which has the tokenizer.
        tasks: names of the harness, such as "arc_easy".
        limit: samples of each task; all by default.
        own_tasks: a folder with task files of the harness's format.
    """
    check_tasks(source, tasks)
    harness = library("lm_eval", extra="lm-eval")
    models = import_module("lm_eval.models.huggingface")
    manager = import_module("lm_eval.tasks").TaskManager
    more = {} if own_tasks is None else {"include_path": str(own_tasks)}
    try:
        with quietly():
            found = harness.simple_evaluate(
                model=models.HFLM(
                    pretrained=model, tokenizer=tokenizer_of(source), batch_size=_BATCH
                ),
                tasks=list(tasks),
                limit=limit,
                task_manager=manager(**more),
            )
    except Exception as error:  # tasks fetch data and run code of the harness
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise LobsError(
            f"the harness cannot run {', '.join(tasks)} ({type(error).__name__}: {text})."
        ) from error
    return {task: _metrics(values) for task, values in found["results"].items()}


def check_tasks(source: Source, tasks: Sequence[str]) -> None:
    """Refuse tasks where they cannot run, before any work."""
    library("lm_eval", extra="lm-eval")
    if isinstance(tasks, str) or not all(isinstance(task, str) and task for task in tasks):
        raise LobsError(f"tasks is {tasks!r}: give a list of names, such as ['arc_easy'].")
    if source.task != "causal":
        raise LobsError(f"tasks are for decoders, and {source.architecture} is none.")


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a task's numbers without their standard errors: 'acc,none' is acc."""
    found = {}
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if isinstance(value, int | float) and kind and not name.endswith("_stderr"):
            found[name if kind == "none" else key] = float(value)
    return found
