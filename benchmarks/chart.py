"""Measure every number of the README: the chart, the bullets and the table of results.

python -m benchmarks.chart            measure, then write docs/chart.json, docs/chart.png, README.md
python -m benchmarks.chart --write    write the picture and the README again from docs/chart.json

The chart: LeNet-300-100, 10,000 calibration images, no retraining. Our line is `lobs.prune` with
its defaults. Each other method gets the better of two layer shares at every point: the same share
of every layer, and the shares that our allocation chose. Magnitude also gets one threshold for the
network. Which one is better is read off the test images, so the choice favours the other methods.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lobs
from benchmarks.rivals import _sweep as column_sweep
from lobs import NumericalWarning, Sparsity, prune, zoo
from lobs.layers import find_layers
from lobs.storage import save_compact
from lobs.zoo.datasets import mnist
from lobs.zoo.training import error_rate

ROOT = Path(__file__).parents[1]
NUMBERS, PICTURE, README = ROOT / "docs/chart.json", ROOT / "docs/chart.png", ROOT / "README.md"

KEPT = (20.0, 10.0, 5.0, 3.0, 2.0, 1.5)
CHART_IMAGES = 10_000
RESULTS = (("lenet300", 7.0), ("lenet300", 3.0), ("lenet5", 7.0), ("lenet5", 3.0))
HEADLINE = 0  # the row of RESULTS that the README's bullets speak of
OURS, SPARSEGPT, LOBS, MAGNITUDE = (
    "lobs, defaults",
    "SparseGPT family",
    "L-OBS as published",
    "magnitude",
)
COLOURS = {OURS: "#1565c0", SPARSEGPT: "#2e7d32", LOBS: "#ef6c00", MAGNITUDE: "#757575"}
Shares = dict[str, float]  # layer → fraction of its weights that is kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="measure nothing")
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    if not given.write:
        numbers = {
            "command": "python -m benchmarks.chart",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": [measure(name, kept) for name, kept in RESULTS],
            "chart": curves(),
        }
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    draw(numbers["chart"])
    if not given.write:
        README.write_text(with_output(README.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8"), numbers), encoding="utf-8")


def measure(name: str, kept: float) -> dict[str, Any]:
    """Prune one network on all training images and measure one row of results."""
    model, test = zoo.trained(name), mnist.load("test").batches()
    result = prune(model, mnist.load("train").batches(500), Sparsity(1 - kept / 100))
    with tempfile.TemporaryDirectory() as folder:
        dense = lobs.save(model, Path(folder) / "dense.safetensors").stat().st_size
        file = Path(folder) / "compact.safetensors"
        save_compact(result.model, file, result.masks, result.record())
        compact = file.stat().st_size
    one = next(iter(test))
    example = (one[0] if isinstance(one, (tuple, list)) else one)[:1]
    fast = lobs.accelerate(result.model, example, progress=False)
    found = {
        "network": zoo.entry(name).title,
        "kept_percent": kept,
        "weights": [result.total, result.kept],
        "error_percent": [error_rate(model, test), error_rate(result.model, test)],
        "file_bytes": [dense, compact],
        "seconds": round(result.seconds, 1),
        "speed_batch_1": round(fast.speedup.middle, 2),
    }
    print(json.dumps(found), flush=True)
    return found


def curves() -> dict[str, Any]:
    """Measure the chart: test errors by method, one for each entry of `KEPT`."""
    train, test = mnist.load("train").batches(500, CHART_IMAGES), mnist.load("test").batches()
    model = zoo.trained("lenet300")
    errors: dict[str, list[float]] = {name: [] for name in COLOURS}
    for kept in KEPT:
        ours = prune(model, train, Sparsity(1 - kept / 100), progress=False)
        errors[OURS].append(error_rate(ours.model, test))
        uniform = {row.name: kept / 100 for row in ours.layers}
        allocated = {row.name: row.kept_fraction for row in ours.layers}

        def best(method: Callable[[Shares], nn.Module], *shares: Shares) -> float:
            return min(error_rate(method(each), test) for each in shares)

        errors[SPARSEGPT].append(
            best(lambda shares: sparsegpt(model, train, shares), uniform, allocated)
        )
        errors[LOBS].append(
            best(lambda shares: by_layer(model, train, "lobs", shares), uniform, allocated)
        )
        errors[MAGNITUDE].append(
            best(
                lambda shares: by_layer(model, train, "magnitude", shares),
                uniform,
                allocated,
                global_magnitude(model, kept / 100),
            )
        )
        print(kept, {name: round(values[-1], 2) for name, values in errors.items()}, flush=True)
    return {
        "network": "LeNet-300-100",
        "images": CHART_IMAGES,
        "kept_percent": list(KEPT),
        "dense_error_percent": error_rate(model, test),
        "error_percent": errors,
    }


def by_layer(model: nn.Module, train: Any, solver: str, shares: Shares) -> nn.Module:
    """Prune each layer to its own share, on the dense network's inputs."""
    target = Sparsity({name: 1 - share for name, share in shares.items()})
    options = {"solver": solver, "inputs": "dense", "refit": "layers"}
    return prune(model, train, target, progress=False, **options).model


def sparsegpt(model: nn.Module, train: Any, shares: Shares) -> nn.Module:
    """Prune layer by layer on the pruned network's inputs; all rows share one column order."""
    pruned = copy.deepcopy(model)
    for layer in find_layers(pruned):
        moment = lobs.collect_moments(pruned, train, [layer.name])[layer.name].moment[0]
        found = column_sweep(layer.matrix()[0], moment, 1 - shares[layer.name], 1)
        layer.write(found[None])
    return pruned


def global_magnitude(model: nn.Module, kept: float) -> Shares:
    """Return the layer shares of one magnitude threshold for the whole network."""
    weights = {layer.name: layer.weight.detach().abs().flatten() for layer in find_layers(model)}
    together = torch.cat(list(weights.values()))
    threshold = together.kthvalue(round((1 - kept) * together.numel())).values
    return {name: float((weight > threshold).double().mean()) for name, weight in weights.items()}


def draw(chart: dict[str, Any]) -> None:
    """Draw test error against weights kept."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    kept = chart["kept_percent"]
    for name, values in chart["error_percent"].items():
        width = 3 if name == OURS else 1.8
        axes.plot(kept, values, "o-", color=COLOURS[name], linewidth=width, label=name)
    dense = chart["dense_error_percent"]
    axes.axhline(dense, color="black", linestyle=":", linewidth=1.2)
    axes.text(kept[0], dense * 0.93, f"dense network, {dense:.2f} %", va="top", ha="left")
    axes.set(xscale="log", yscale="log", xlabel="weights kept (%)", ylabel="test error (%)")
    axes.set_title(f"{chart['network']} on MNIST, one shot, no retraining, no labels", fontsize=12)
    axes.set_xticks(kept, [f"{each:g}" for each in kept])
    ticks = [1, 2, 5, 10, 20, 50, 90]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(1.1, 100)
    axes.invert_xaxis()
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.8)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(PICTURE, dpi=130)


def filled(text: str, numbers: dict[str, Any]) -> str:
    """Put the measured numbers between the README's markers."""
    for marker, lines in (("bullets", bullets(numbers)), ("results", table(numbers))):
        pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
        assert re.search(pattern, text, flags=re.S), f"README.md has no block {marker}"
        text = re.sub(
            pattern, lambda m, t=lines: m[1] + "\n".join(t) + "\n" + m[2], text, flags=re.S
        )
    return text


def bullets(numbers: dict[str, Any]) -> list[str]:
    """Write the six bullets, all from one run."""
    row = numbers["results"][HEADLINE]
    (total, kept), (before, after) = row["weights"], row["error_percent"]
    dense, compact = row["file_bytes"]
    return [
        f"- **Weights:** {total / kept:.0f}× fewer. {total:,} become {kept:,}, to the exact count.",
        f"- **File:** {dense / 1000:,.0f} kB become {compact / 1000:,.0f} kB, without rounding.",
        f"- **Speed:** {row['speed_batch_1']:.1f}× faster on a CPU, one image at a time.",
        f"- **Accuracy:** test error {before:.2f} → {after:.2f} %. "
        f"That is {round(100 * (after - before))} more mistakes in 10,000.",
        "- **Labels:** none. Unlabelled inputs are enough, and nothing is retrained.",
        f"- **Time:** {row['seconds']:.0f} s on {numbers['threads']} "
        f"CPU thread{'s' if numbers['threads'] > 1 else ''}.",
    ]


def table(numbers: dict[str, Any]) -> list[str]:
    """Write the table of results."""
    head = "| model | weights kept | accuracy before → after | file before → after | time |"
    rows = [head, "|---|---|---|---|---|"]
    for row in numbers["results"]:
        before, after = (100 - error for error in row["error_percent"])
        dense, compact = (f"{size / 1000:,.0f} kB" for size in row["file_bytes"])
        rows.append(
            f"| {row['network']} | {row['kept_percent']:g} % | {before:.2f} → {after:.2f} % | "
            f"{dense} → {compact} | {row['seconds']:.0f} s |"
        )
    return [*rows, resnet_row()]


def resnet_row() -> str:
    """Write ResNet-50's row from the result files of `experiments.dong2017`."""
    folder = ROOT / "experiments/dong2017/results"
    dense, pruned = (
        json.loads((folder / f"resnet50-{name}.json").read_text(encoding="utf-8"))
        for name in ("dense", "default-50")
    )
    return (
        f"| ResNet-50, top-1 | {pruned['kept_percent']:g} % | "
        f"{dense['top1']:.1f} → {pruned['top1']:.1f} % | not measured | "
        f"{pruned['prune_seconds'] / 60:.0f} min |"
    )


def with_output(text: str) -> str:
    """Run the README's first Python block and put its output into the block that follows."""
    pattern = r"(```python\n(.*?)```\n\n```text\n).*?(```)"
    found = re.search(pattern, text, flags=re.S)
    assert found, "README.md has no Python block followed by a text block"
    # In a process of its own, whose memory is that of these lines.
    with tempfile.TemporaryDirectory() as folder:
        printed = subprocess.run(
            [sys.executable, "-c", found[2]], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return text[: found.start()] + found[1] + lines + "\n" + found[3] + text[found.end() :]


if __name__ == "__main__":
    main()
