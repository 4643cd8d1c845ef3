"""Compare ways to share one budget among the layers of a transformer.

    python -m benchmarks.allocation stories15m llama2.data tinystories.txt [--keep 0.5 0.3]
    python -m benchmarks.allocation smollm2 FOLDER valid.txt test.txt --rows 16

"uniform": each layer its share. "influence": the default, error curves weighted by output
influence, two rounds. "OWL" (Yin et al. 2024): blocks with more outliers of |w|·‖x‖, above five
times the mean, keep more, within ±8 points. "error" and "error, inverse": layers with a large
relative error when half of their weights go keep more, or less, within ±8 points (LSA, Yang et al.
2026, ranks layers by such an error). All layers are then solved alike, without a refit. "least"
is the smallest share that a layer keeps. Models, texts and judges are those of `benchmarks.blocks`.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lobs
from benchmarks.blocks import case, head
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import Layer, find_layers
from lobs.solvers import solve

SPREAD = 0.08  # of the kept share, as OWL is published
OUTLIER = 5.0  # multiples of the mean score


def block_of(name: str) -> str:
    """Return what stands before a layer's own name in a block: `model.layers.3`."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name


def outliers(layers: list[Layer], moments: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of outliers in the block of each layer."""
    scores: dict[str, list[Tensor]] = {}
    for layer in layers:
        size = moments[layer.name].moment.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(1)
        score = layer.matrix().double().abs() * size
        scores.setdefault(block_of(layer.name), []).append(score.flatten())
    found = {}
    for block, parts in scores.items():
        every = torch.cat(parts)
        found[block] = float((every > OUTLIER * every.mean()).double().mean())
    return {layer.name: found[block_of(layer.name)] for layer in layers}


def halved(layers: list[Layer], moments: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of each layer once half of its weights are gone."""
    found = {}
    for layer in layers:
        problem = layer_problem(layer, layer.matrix(), moments[layer.name])
        found[layer.name] = solve(problem, "columns", keep=0.5).error / max(problem.energy, 1e-30)
    return found


def spread(layers: list[Layer], ranks: Mapping[str, float], keep: float) -> dict[str, float]:
    """Return kept shares that rise with the ranks, and keep as many weights in all."""
    low, high = min(ranks.values()), max(ranks.values())
    raised = {n: 2 * SPREAD * (r - low) / max(high - low, 1e-30) for n, r in ranks.items()}
    sizes = {layer.name: layer.weight.numel() for layer in layers}
    mean = sum(raised[n] * size for n, size in sizes.items()) / sum(sizes.values())
    return {n: min(1.0, max(0.01, keep + r - mean)) for n, r in raised.items()}


def shares(model: nn.Module, batches: Any, keep: float) -> dict[str, dict[str, float]]:
    """Return each rule's kept shares by layer."""
    layers = find_layers(model, skip=head(model))
    moments = lobs.collect_moments(model, batches, layers)
    errors = halved(layers, moments)
    ranks = {
        "OWL": outliers(layers, moments),
        "error": errors,
        "error, inverse": {name: -error for name, error in errors.items()},
    }
    return {rule: spread(layers, found, keep) for rule, found in ranks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["stories15m", "smollm2", "minilm"])
    parser.add_argument("weights", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--keep", type=float, nargs="*", default=[0.5, 0.3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver", default="columns")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = case(given)
    calibrate = found.calibrate[: given.rows]
    batches = [{"input_ids": row} for row in calibrate.split(max(8, given.rows // 16))]
    print(f"dense: {found.best:.4g}; {calibrate.numel():,} tokens\n")
    print("| kept | rule | loss | least | seconds |\n|---|---|---|---|---|")
    for keep in given.keep:
        ways: dict[str, Any] = {
            "uniform": {"target": lobs.Sparsity(1 - keep, scope="layer")},
            "influence": {"keep": keep},
            **{rule: {"keep": by} for rule, by in shares(found.model, batches, keep).items()},
        }
        for rule, way in ways.items():
            began = time.perf_counter()
            result = lobs.prune(
                found.model,
                batches,
                **way,
                skip=head(found.model),
                solver=given.solver,
                refit="layers",
                progress=False,
            )
            took = time.perf_counter() - began
            least = min(layer.kept / layer.total for layer in result.layers)
            loss = found.loss(result.model)
            print(f"| {keep:.0%} | {rule} | {loss:.4g} | {least:.1%} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
