"""Compare `prune` with its rivals on small transformers: perplexity or cosine on held-out text.

    python -m benchmarks.blocks stories15m llama2.data tinystories.txt
    python -m benchmarks.blocks smollm2 FOLDER valid.txt test.txt [--rows 16 32 64 128]
        [--targets 0.5 0.7 2:4] [--refit blocks layers] [--rivals SparseGPT ADMM]
    python -m benchmarks.blocks minilm FOLDER valid.txt test.txt --rows 512

Every method prunes every linear layer but the head, with the same count in each layer, on the same
rows of tokens. Rivals see the inputs that their own pruned layers give. stories15M: 64 rows of 256
tokens calibrate and the others judge; rows are drawn with a fixed seed. SmolLM2: rows of 512 tokens
of the first text calibrate, the first 8×1024 tokens of the second judge. MiniLM: rows of 64 tokens;
512 rows of the second text judge, by the mean cosine between dense and pruned embeddings. "excess"
is the perplexity over the dense one's, or one minus the cosine, relative to that of ADMM. Methods
"shared" and "uniform" are the default with one budget for the network and with one for each layer.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lobs
from benchmarks.baselines.sequential import RIVALS, pruned_by
from benchmarks.language_models import (
    embeddings,
    minilm,
    perplexity,
    sequences,
    smollm2,
    stories15m,
)


@dataclass(frozen=True)
class Case:
    """A model, rows of tokens that may calibrate, and how a pruned one is judged.

    `loss` is the perplexity, or one minus the mean cosine. `best` is the dense network's. `judged`
    says what the loss is measured on.
    """

    model: nn.Module
    calibrate: Tensor
    loss: Callable[[nn.Module], float]
    best: float
    judged: str = ""


def case(given: argparse.Namespace) -> Case:
    """Load the model and the texts."""
    seed = torch.Generator().manual_seed(given.seed)
    if given.model == "stories15m":
        model, tokenizer = stories15m(given.weights)
        rows = sequences(tokenizer.encode(given.text[0].read_text()), 256)
        rows = rows[torch.randperm(len(rows), generator=seed)]
        calibrate, judge = rows[:64], rows[64:]
    elif given.model == "smollm2":
        model, tokenizer = smollm2(given.weights)
        tokens = [tokenizer(file.read_text())["input_ids"] for file in given.text]
        calibrate, judge = sequences(tokens[0], 512), sequences(tokens[1], 1024)[:8]
        calibrate = calibrate[torch.randperm(len(calibrate), generator=seed)]
    else:
        model, tokenizer = minilm(given.weights)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        texts = [tokenizer.encode(file.read_text()).ids for file in given.text]
        calibrate, judge = (sequences(ids, 64) for ids in texts)
        calibrate = calibrate[torch.randperm(len(calibrate), generator=seed)]
        judge = judge[torch.randperm(len(judge), generator=seed)[:512]]
        dense = embeddings(model, judge)
        return Case(
            model, calibrate, lambda m: 1 - float((embeddings(m, judge) * dense).sum(1).mean()),
            0.0, _judged(judge),
        )  # fmt: skip
    best = perplexity(model, judge)
    return Case(model, calibrate, partial(perplexity, rows=judge), best, _judged(judge))


def _judged(rows: Tensor) -> str:
    return f"{len(rows):,} rows of {rows.shape[1]:,} tokens"


def head(model: nn.Module) -> tuple[str, ...]:
    """Return the name of the last layer where it shares the embedding's weights."""
    return ("lm_head",) if hasattr(model, "lm_head") else ()


def ours(model: nn.Module, batches: Any, target: str, refit: str) -> tuple[nn.Module, str]:
    """Prune by a call of `prune`; return the network and the seconds of each phase."""
    scope: Any = "network" if refit == "shared" else "layer"
    wish: lobs.Target = (
        lobs.NByM(2, 4) if target == "2:4" else lobs.Sparsity(float(target), scope=scope)
    )
    how: Any = {} if refit in ("shared", "uniform") else {"refit": refit}
    result = lobs.prune(model, batches, wish, skip=head(model), progress=False, **how)
    spent = {name: round(seconds, 1) for name, seconds in result.phases.items()}
    return result.model, f"{spent}; {result.settings.get('refit', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["stories15m", "smollm2", "minilm"])
    parser.add_argument("weights", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--targets", nargs="*", default=["0.5", "0.7", "2:4"])
    parser.add_argument("--refit", nargs="*", default=["uniform", "layers"])
    parser.add_argument("--rivals", nargs="*", default=["Wanda", "SparseGPT", "ADMM"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = case(given)
    print(f"dense: {found.best:.2f}\n")
    print("| tokens | target | method | loss | excess : ADMM's | seconds | |")
    print("|---|---|---|---|---|---|---|")
    for rows in given.rows:
        batches = [{"input_ids": row} for row in found.calibrate[:rows].split(max(8, rows // 16))]
        tokens = found.calibrate[:rows].numel()
        for target in given.targets:
            reference = None
            for method in [*reversed([r for r in RIVALS if r in given.rivals]), *given.refit]:
                began, detail = time.perf_counter(), ""
                if method in RIVALS:
                    pattern = (2, 4) if target == "2:4" else None
                    share = 0.5 if pattern else float(target)
                    small = pruned_by(
                        method, found.model, batches, share, pattern, head(found.model)
                    )
                else:
                    small, detail = ours(found.model, batches, target, method)
                took, excess = time.perf_counter() - began, found.loss(small) - found.best
                reference = excess if method == "ADMM" else reference
                ratio = f"{excess / reference:.2f}" if reference else "–"
                print(
                    f"| {tokens:,} | {target} | {method} | {found.best + excess:.4g} | {ratio} "
                    f"| {took:.0f} | {detail} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
