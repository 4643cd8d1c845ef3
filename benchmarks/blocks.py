"""Compare `prune` with its rivals on small language models: perplexity on held-out text.

    python -m benchmarks.blocks stories15m llama2.data tinystories.txt
    python -m benchmarks.blocks smollm2 FOLDER valid.txt test.txt [--rows 16 32 64 128]
        [--targets 0.5 0.7 2:4] [--refit blocks layers] [--rivals SparseGPT ADMM]

Every method prunes every linear layer but the head, with the same count in each layer, on the same
rows of tokens. Rivals see the inputs that their own pruned layers give. stories15M: 64 rows of 256
tokens calibrate and the others judge; rows are drawn with a fixed seed. SmolLM2: rows of 512 tokens
of the first text calibrate, the first 8×1024 tokens of the second judge. "excess" is the
perplexity over the dense one's, relative to that of ADMM.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lobs
from benchmarks.baselines.sequential import RIVALS, pruned_by
from benchmarks.language_models import perplexity, sequences, smollm2, stories15m


def texts(given: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, the rows that may calibrate, and those that judge."""
    if given.model == "stories15m":
        model, tokenizer = stories15m(given.weights)
        rows = sequences(tokenizer.encode(given.text[0].read_text()), 256)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(given.seed))
        return model, rows[order[:64]], rows[order[64:]]
    model, tokenizer = smollm2(given.weights)
    calibrate, judge = (tokenizer(file.read_text())["input_ids"] for file in given.text)
    rows = sequences(calibrate, 512)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(given.seed))
    return model, rows[order], sequences(judge, 1024)[:8]


def ours(model: nn.Module, batches: Any, target: str, refit: str) -> tuple[nn.Module, str]:
    """Prune by a call of `prune`; return the network and the seconds of each phase."""
    wish: lobs.Target = (
        lobs.NByM(2, 4) if target == "2:4" else lobs.Sparsity(float(target), scope="layer")
    )
    how: Any = {} if refit == "default" else {"refit": refit}
    result = lobs.prune(model, batches, wish, skip="lm_head", progress=False, **how)
    spent = {name: round(seconds, 1) for name, seconds in result.phases.items()}
    return result.model, f"{spent}; {result.settings.get('refit', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["stories15m", "smollm2"])
    parser.add_argument("weights", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--targets", nargs="*", default=["0.5", "0.7", "2:4"])
    parser.add_argument("--refit", nargs="*", default=["default", "layers"])
    parser.add_argument("--rivals", nargs="*", default=["Wanda", "SparseGPT", "ADMM"])
    parser.add_argument("--blocks", type=int, help="only the first so many blocks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    model, calibrate, judge = texts(given)
    if given.blocks:
        model.model.layers = model.model.layers[: given.blocks]
    dense = perplexity(model, judge)
    print(f"dense perplexity {dense:.2f} on {judge.numel():,} tokens\n")
    print("| tokens | target | method | perplexity | excess : ADMM's | seconds | |")
    print("|---|---|---|---|---|---|---|")
    for rows in given.rows:
        batches = [{"input_ids": row} for row in calibrate[:rows].split(8)]
        tokens = calibrate[:rows].numel()
        for target in given.targets:
            reference = None
            for method in [*reversed([r for r in RIVALS if r in given.rivals]), *given.refit]:
                began, detail = time.perf_counter(), ""
                if method in RIVALS:
                    pattern = (2, 4) if target == "2:4" else None
                    share = 0.5 if pattern else float(target)
                    found = pruned_by(method, model, batches, share, pattern, "lm_head")
                else:
                    found, detail = ours(model, batches, target, method)
                took, score = time.perf_counter() - began, perplexity(found, judge)
                reference = score - dense if method == "ADMM" else reference
                ratio = f"{(score - dense) / reference:.2f}" if reference else "–"
                print(
                    f"| {tokens:,} | {target} | {method} | {score:.2f} | {ratio} | {took:.0f} "
                    f"| {detail} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
