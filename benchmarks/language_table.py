"""The table of language models: six methods at five targets, in one file that grows row by row.

    python -m benchmarks.language_table stories15m llama2.data tinystories.txt
    python -m benchmarks.language_table smollm2 FOLDER valid.txt test.txt
    python -m benchmarks.language_table minilm FOLDER valid.txt test.txt --rows 512
    python -m benchmarks.language_table --write

Models, texts and judging are those of `benchmarks.blocks`. Every method prunes every linear layer
but the head, with the same count in each layer, on the same rows. Each row of the table runs in a
process of its own, so its peak memory is its own. Finished rows stand in `--numbers` and are not
run again, so an interrupted table goes on where it stopped. `--write` measures nothing: it draws
the chart and writes the table into docs/language-models.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lobs
from benchmarks.baselines.block_refit import Adam, admm_and_refit
from benchmarks.baselines.sequential import RIVALS, pruned_by
from benchmarks.blocks import Case, case, head
from lobs._system.run_log import peak_bytes
from lobs.storage.atomic import atomic_write

ROOT = Path(__file__).parents[1]
NUMBERS, PICTURE = ROOT / "docs/language-models.json", ROOT / "docs/language-models.png"
PAGE, BEGIN, END = ROOT / "docs/language-models.md", "<!-- table -->", "<!-- end of table -->"
OURS, REFITTED = "lobs", "ADMM + block refit"
METHODS = (*RIVALS, REFITTED, OURS)
TARGETS = ("0.5", "0.6", "0.7", "2:4", "4:8")
ROWS = {"stories15m": 64, "smollm2": 64, "minilm": 512}
TITLES = {"stories15m": "stories15M", "smollm2": "SmolLM2-135M", "minilm": "MiniLM-L6"}
LOSSES = {"minilm": "1 − cosine"}
COLOURS = {
    OURS: "#1565c0", REFITTED: "#6a1b9a", "ADMM": "#00838f", "SparseGPT": "#2e7d32",
    "Wanda": "#ef6c00", "magnitude": "#757575",
}  # fmt: skip
Row = dict[str, Any]


def main() -> None:
    given = _given()
    warnings.simplefilter("ignore")
    if given.one:
        print(json.dumps(one(given, *given.one)))
        return
    if not given.write:
        for target in given.targets:
            for method in given.methods:
                measure(given, method, target)
    rows = read(given.numbers)
    if given.write:
        draw(rows, PICTURE)
        write_page(rows)
    print("\n".join(table(rows)))


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=list(ROWS))
    parser.add_argument("weights", nargs="?", type=Path)
    parser.add_argument("text", type=Path, nargs="*")
    parser.add_argument("--rows", type=int, help="rows of tokens that calibrate")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=Adam.epochs, help=f"of {REFITTED}")
    parser.add_argument("--rate", type=float, default=Adam.rate, help=f"of {REFITTED}")
    parser.add_argument("--numbers", type=Path, default=NUMBERS, help="the file of rows")
    parser.add_argument("--write", action="store_true", help="write the chart and the page")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "TARGET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.write and not (given.model and given.weights and given.text):
        parser.error("give a model, its weights and its texts, or --write")
    given.rows = given.rows or ROWS.get(given.model, 0)
    return given


def key(given: argparse.Namespace, method: str, target: str) -> Row:
    """Return what makes a row the same row."""
    found = {"model": given.model, "rows": given.rows, "seed": given.seed, "target": target}
    if method == REFITTED:
        found |= {"epochs": given.epochs, "rate": given.rate}
    return {**found, "method": method}


def measure(given: argparse.Namespace, method: str, target: str) -> None:
    """Run one row in a process of its own and add it to the file; a finished row is not run."""
    rows, own = read(given.numbers), key(given, method, target)
    if any(all(row.get(k) == v for k, v in own.items()) for row in rows):
        print(f"found: {method} at {target}", flush=True)
        return
    words = [*sys.argv[1:], "--one", method, target]
    command = [sys.executable, "-m", "benchmarks.language_table", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"failed: {method} at {target}: {last[0]}", flush=True)
        return
    row = {**own, **json.loads(done.stdout.splitlines()[-1])}
    with atomic_write(given.numbers) as partial:
        partial.write_text(json.dumps([*read(given.numbers), row], indent=1) + "\n")
    print(f"{method} at {target}: {row['loss']:.4g} in {row['seconds']:.0f} s", flush=True)


def one(given: argparse.Namespace, method: str, target: str) -> Row:
    """Load the model, prune it by one method, and return the row."""
    found = case(given)
    rows = found.calibrate[: given.rows]
    batches = [{"input_ids": row} for row in rows.split(max(8, given.rows // 16))]
    began = time.perf_counter()
    small = pruned(found, batches, method, target, Adam(given.epochs, given.rate))
    seconds = time.perf_counter() - began
    return {
        "dense": found.best,
        "loss": found.loss(small),
        "kept": _kept(small),
        "tokens": rows.numel(),
        "length": rows.shape[1],
        "judged": found.judged,
        "seconds": round(seconds, 1),
        "peak_bytes": peak_bytes(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def pruned(found: Case, batches: list[Any], method: str, target: str, adam: Adam) -> nn.Module:
    """Return the network pruned by one method.

    Args:
        found: the model and its texts.
        batches: what calibrates.
        method: one of `METHODS`.
        target: the fraction to remove, or n:m.
        adam: how the rival's blocks are refitted.
    """
    n, _, m = target.partition(":")
    pattern = (int(n), int(m)) if m else None
    share = 1 - int(n) / int(m) if m else float(target)
    skip = head(found.model)
    if method == OURS:
        wish = lobs.NByM(*pattern) if pattern else lobs.Sparsity(share, scope="layer")
        result = lobs.prune(found.model, batches, wish, skip=skip, progress=False)
        return result.model
    if method == REFITTED:
        return admm_and_refit(found.model, batches, share, pattern, skip, adam)
    return pruned_by(method, found.model, batches, share, pattern, skip)


def _kept(model: nn.Module) -> float:
    """Return the share of weights that are not zero, of the layers that may be pruned."""
    from lobs.layers import find_layers

    layers = find_layers(model, skip=head(model))
    count = sum(int((x.weight != 0).sum()) for x in layers)
    return count / sum(x.weight.numel() for x in layers)


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none where it does not exist."""
    return json.loads(path.read_text()) if path.is_file() else []


def table(rows: Sequence[Row]) -> list[str]:
    """Return a table in Markdown for each model and amount of data: methods by targets."""
    lines: list[str] = []
    cases = sorted({(row["model"], row["tokens"], row["seed"]) for row in rows})
    for model, tokens, seed in cases:
        own = [r for r in rows if (r["model"], r["tokens"], r["seed"]) == (model, tokens, seed)]
        targets = [t for t in TARGETS if any(r["target"] == t for r in own)]
        first = own[0]
        measure = LOSSES.get(model, "perplexity")
        lines += [
            "",
            f"**{TITLES[model]}**, {measure}. Calibration: {tokens:,} tokens in rows of "
            f"{first['length']}, seed {seed}. Judged on {first['judged']}. "
            f"Dense: {first['dense']:.4g}.",
            "",
            f"| method | {' | '.join(map(_named, targets))} | seconds | peak memory |",
            f"|---|{'---|' * (len(targets) + 2)}",
        ]
        for method in METHODS:
            mine = {r["target"]: r for r in own if r["method"] == method}
            if not mine:
                continue
            cells = [f"{mine[t]['loss']:.4g}" if t in mine else "–" for t in targets]
            spent = [r["seconds"] for r in mine.values()]
            most = max(r["peak_bytes"] or 0 for r in mine.values())
            times = f"{min(spent):.0f} to {max(spent):.0f}"
            lines.append(f"| {method} | {' | '.join(cells)} | {times} | {most / 1e9:.2f} GB |")
    return lines


def _named(target: str) -> str:
    return target if ":" in target else f"{100 * float(target):.0f} % removed"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the loss against the weights kept, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, ScalarFormatter

    models = [model for model in ROWS if any(row["model"] == model for row in rows)]
    if not models:
        raise SystemExit("there is no row to draw: run the table first")
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        own = [row for row in rows if row["model"] == model and ":" not in row["target"]]
        most = max((row["tokens"] for row in own), default=0)
        for method in METHODS:
            points = sorted(
                (100 * row["kept"], row["loss"])
                for row in own
                if row["method"] == method and row["tokens"] == most
            )
            if points:
                thick = 2.4 if method == OURS else 1.4
                axis.plot(*zip(*points, strict=True), marker="o", ms=4, lw=thick, label=method,
                          color=COLOURS[method])  # fmt: skip
        if own and model not in LOSSES:
            axis.axhline(own[0]["dense"], color="#9e9e9e", lw=1, ls=":")
            axis.text(0.99, own[0]["dense"], "dense", ha="right", va="bottom", fontsize=8,
                      color="#757575", transform=axis.get_yaxis_transform())  # fmt: skip
        axis.set(title=TITLES[model], xlabel="weights kept (%)", yscale="log")
        axis.set_ylabel(LOSSES.get(model, "perplexity") + ", held-out text")
        axis.set_xticks(sorted({round(100 * row["kept"]) for row in own}))
        axis.invert_xaxis()
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    shown = [method for method in METHODS if method in lines]
    figure.legend([lines[m] for m in shown], shown, frameon=False, fontsize=8, ncol=3,
                  loc="lower center")  # fmt: skip
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def write_page(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the table and the chart's line between the marks of the page."""
    before, mark, rest = page.read_text().partition(BEGIN)
    _, other, after = rest.partition(END)
    if not (mark and other):
        raise SystemExit(f"'{page}' has no marks {BEGIN} and {END}")
    chart = f"![Loss against weights kept]({PICTURE.name})"
    text = "\n".join([BEGIN, "", chart, *table(rows), "", END])
    page.write_text(before + text + after)


if __name__ == "__main__":
    main()
