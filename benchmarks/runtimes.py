"""Time pruned networks in the runtimes that people use: torch, ONNX Runtime, OpenVINO, and ours.

    python -m benchmarks.runtimes [--threads 1] [--kept 0.5 0.3 0.1] [--only lenet5 resnet50 …]
        [--minilm FOLDER] [--smollm2 FOLDER] [--json numbers.json] [--chart docs/runtimes.png]

Weights are masked by magnitude: zeros cost the same wherever they come from. All contenders of a
row take turns in one process, on as many threads; lower quartiles are shown. ONNX Runtime, OpenVINO
and compiled torch get the network at 50 % kept: their times do not depend on zeros. Eight bits of
ONNX Runtime and OpenVINO are one file: static quantisation of weights and activations by ONNX
Runtime's own tool, calibrated on the example. A dash is a contender that does not run here, and the
reason is printed. On a shared machine trust the ratios; run it on an idle one.

With `--json`, rows that the file has are not measured again, so an interrupted run goes on where it
stopped. `--again` measures them anew.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lobs
from lobs import zoo

OURS = "lobs"
COLUMNS = (
    "torch", "torch.compile", "ONNX Runtime", "ONNX Runtime int8", "OpenVINO", "OpenVINO int8",
    OURS, "lobs 16-bit", "lobs int8",
)  # fmt: skip


def masked(model: nn.Module, kept: float) -> nn.Module:
    """Return a copy in which each layer keeps its largest weights; tied weights stay."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) not in tied:
            size = module.weight.abs().flatten()
            gone = round((1 - kept) * len(size))
            if gone:
                module.weight.masked_fill_(module.weight.abs() <= size.kthvalue(gone).values, 0)
    return model


def mobile_net() -> nn.Module:
    """Return a network like MobileNet: depthwise and pointwise convolutions, random weights."""

    def step(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    widths = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    widths += [(256, 512, 2), *[(512, 512, 1)] * 5, (512, 1024, 2), (1024, 1024, 1)]
    for width in widths:
        layers += step(*width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()

        def conv(a: int, b: int, size: int, stride: int = 1) -> nn.Sequential:
            plain = nn.Conv2d(a, b, size, stride, size // 2, bias=False)
            return nn.Sequential(plain, nn.BatchNorm2d(b))

        self.one, self.two = conv(inputs, width, 1), conv(width, width, 3, stride)
        self.three = conv(width, 4 * width, 1)
        same = inputs == 4 * width and stride == 1
        self.around = nn.Identity() if same else conv(inputs, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.two(torch.relu(self.one(x))))
        return torch.relu(self.three(inner) + self.around(x))


def resnet50() -> nn.Module:
    """Return ResNet-50's architecture with random weights: time does not depend on them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(_Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class _Hidden(nn.Module):
    """An encoder that takes token numbers by position, as the exporters want it."""

    def __init__(self, inner: nn.Module, field: str) -> None:
        super().__init__()
        self.inner, self.field = inner, field

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return getattr(self.inner(input_ids=ids), self.field)


def networks(given: argparse.Namespace) -> dict[str, Callable[[], tuple[str, nn.Module, Any]]]:
    """Return the networks by name: title, network, and an example."""
    from benchmarks.language_models import minilm, smollm2

    torch.manual_seed(0)
    image = torch.randn(1, 3, 224, 224)
    found: dict[str, Callable[[], tuple[str, nn.Module, Any]]] = {
        "lenet5": lambda: ("LeNet-5", zoo.trained("lenet5"), torch.randn(1, 1, 28, 28)),
        "mobilenet": lambda: ("MobileNet-like, 224²", mobile_net(), image),
        "resnet50": lambda: ("ResNet-50, 224²", resnet50(), image),
    }
    if given.minilm:
        ids = torch.randint(30000, (1, 128))
        found["minilm"] = lambda: (
            "MiniLM, 128 tokens", _Hidden(minilm(given.minilm)[0], "last_hidden_state"), ids
        )  # fmt: skip
    if given.smollm2:
        for name, count in (("prefill", 128), ("step", 1)):
            ids = torch.randint(40000, (1, count))
            found[name] = lambda ids=ids, name=name: (
                f"SmolLM2-135M, {name}, {ids.shape[1]} tokens",
                _Hidden(smollm2(given.smollm2)[0], "logits"),
                ids,
            )
    return found


def compiled(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    fast = torch.compile(model)
    fast(x)
    return lambda: fast(x)


def onnx_runtime(
    model: nn.Module, x: torch.Tensor, export: Callable[..., bytes] | None = None
) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        (export or exported)(model, x), options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def exported(model: nn.Module, x: torch.Tensor) -> bytes:
    """Return the network as an ONNX file."""
    file = io.BytesIO()
    with torch.no_grad():
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=17)
    return file.getvalue()


def quantised(model: nn.Module, x: torch.Tensor) -> bytes:
    """Return the network as an ONNX file with 8-bit weights and activations."""
    from onnxruntime import quantization

    class Example(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            self.left = [{name: x.numpy()}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder, "plain.onnx"), Path(folder, "small.onnx")
        plain.write_bytes(exported(model, x))
        name = onnxruntime.InferenceSession(str(plain)).get_inputs()[0].name
        quantization.quantize_static(plain, small, Example(name), per_channel=True)
        return small.read_bytes()


def open_vino(
    model: nn.Module, x: torch.Tensor, export: Callable[..., bytes] | None = None
) -> Callable[[], Any]:
    import openvino

    core = openvino.Core()
    network = core.read_model((export or exported)(model, x), b"")
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1} | precision
    request = core.compile_model(network, "CPU", settings).create_infer_request()
    feed = x.numpy()
    return lambda: request.infer([feed])


def ours(model: nn.Module, x: torch.Tensor, **options: Any) -> Callable[[], Any]:
    fast = lobs.accelerate(model, x, progress=False, seconds=0.2, **options).model
    return lambda: fast(x)


CONTENDERS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[[], Any]]] = {
    "torch": lambda model, x: lambda: model(x),
    "torch.compile": compiled,
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": open_vino,
    "ONNX Runtime int8": lambda model, x: onnx_runtime(model, x, quantised),
    "OpenVINO int8": lambda model, x: open_vino(model, x, quantised),
    OURS: ours,
    "lobs 16-bit": lambda model, x: ours(model, x, values="float16"),
    "lobs int8": lambda model, x: ours(model, x, values="int8"),
}


def check(name: str, found: Any, expected: torch.Tensor) -> None:
    """Refuse a contender that computes something else; say by how much eight bits are off."""
    if not isinstance(found, torch.Tensor):  # a list of arrays, or OpenVINO's mapping
        found = torch.as_tensor(found[0])
    off = float((found - expected).norm() / expected.norm())
    if "int8" in name:
        print(f"  {name}: its output differs by {off:.1%}")
    if off > (0.5 if "int8" in name else 1e-3):
        raise ValueError(f"its output differs by {off:.1%}")


def timed(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the lower quartile of each contender's times; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    order = list(runs)
    for turn in range(200):
        random.shuffle(order)  # threads of some runtimes spin on while the next contender runs
        for name in order:
            run, start = runs[name], time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        if turn >= 4 and time.perf_counter() - began > seconds:
            break
    return {name: float(np.quantile(found, 0.25)) for name, found in times.items()}


def measure(
    title: str, model: nn.Module, x: torch.Tensor, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each kept fraction.

    Args:
        title: the network's name.
        model: the network.
        x: its input.
        given: the arguments.
    """
    left, rows = missing(title, given), []
    if not left:
        return []
    whole = masked(model, 0.5)
    runs: dict[str, Callable[[], Any]] = {}
    for name in COLUMNS:
        if name.startswith(OURS) or name in given.without:
            continue
        try:
            runs[name] = CONTENDERS[name](whole, x)
            check(name, runs[name](), whole(x))
        except Exception as error:
            text = " ".join(str(error).split())[:120]
            print(f"  {title}: {name} does not run here: {type(error).__name__}: {text}")
            runs.pop(name, None)
    for kept in left:
        pruned = masked(model, kept)
        mine = {
            name: CONTENDERS[name](pruned, x)
            for name in COLUMNS
            if name.startswith(OURS) and name not in given.without
        }
        rows.append({"network": title, "kept": kept, "seconds": timed(runs | mine, given.seconds)})
        keep(rows[-1], given.json)
    return rows


def decoding(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rows of greedy decoding with `generate`, 64 tokens after a prompt, per token."""
    from benchmarks.language_models import smollm2

    title = "SmolLM2-135M, greedy decoding, a token"
    left = missing(title, given)
    if not left:
        return []
    model, tokenizer = smollm2(folder)
    model.config.use_cache = True
    prompt = tokenizer("The history of the city begins with", return_tensors="pt").input_ids
    rows = []
    for kept in left:
        pruned = masked(model, kept)
        contenders, answers = {"torch": pruned}, {}
        for name, values in ((OURS, "float32"), ("lobs 16-bit", "float16"), ("lobs int8", "int8")):
            if name not in given.without:
                one = {"input_ids": prompt[:, :1]}
                contenders[name] = lobs.accelerate(
                    pruned, one, values=values, progress=False, release_dense=True, seconds=0.2
                ).model
        runs = {}
        for name, network in contenders.items():

            def run(name: str = name, network: Any = network, answers: Any = answers) -> None:
                answers[name] = network.generate(
                    prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
                )

            runs[name] = run
        seconds = {name: s / 64 for name, s in timed(runs, given.seconds).items()}
        rows.append({"network": title, "kept": kept, "seconds": seconds})
        keep(rows[-1], given.json)
        same = {
            name: f"{float((answer == answers['torch']).float().mean()):.0%}"
            for name, answer in answers.items()
        }
        print(f"  same tokens as torch: {same}", flush=True)
    return rows


def missing(title: str, given: argparse.Namespace) -> list[float]:
    """Return the kept fractions that the file of numbers does not have yet."""
    rows = saved(given.json) if given.json and not given.again else []
    done = {row["kept"] for row in rows if row["network"] == title}
    return [kept for kept in given.kept if kept not in done]


def saved(file: Path) -> list[dict[str, Any]]:
    """Return the rows of the file of numbers."""
    return json.loads(file.read_text()) if file.exists() else []


def keep(row: dict[str, Any], file: Path | None) -> None:
    """Print a row, and add it to the file of numbers in the place of an older one."""
    print(line(row), flush=True)
    if file is not None:
        rows = [
            r for r in saved(file) if (r["network"], r["kept"]) != (row["network"], row["kept"])
        ]
        file.write_text(json.dumps([*rows, row], indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: milliseconds, and in brackets how many times faster than torch."""
    dense, cells = row["seconds"]["torch"], []
    for name in COLUMNS:
        seconds = row["seconds"].get(name)
        ratio = "" if seconds is None or name == "torch" else f" ({dense / seconds:.2f}×)"
        cells.append("–" if seconds is None else f"{1e3 * seconds:.3g}{ratio}")
    return f"| {row['network']} | {row['kept']:.0%} | {' | '.join(cells)} |"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw how many times faster than dense torch each runtime is."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["network"] == name]
        for column in COLUMNS[1:]:
            points = [
                (100 * r["kept"], r["seconds"]["torch"] / r["seconds"][column])
                for r in mine
                if column in r["seconds"]
            ]
            if points:
                style = {"linewidth": 2.5} if column.startswith(OURS) else {"linestyle": "--"}
                axis.plot(*zip(*points, strict=True), marker="o", label=column, **style)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=name, xlabel="weights kept, %")
        axis.title.set_fontsize(8)
        axis.invert_xaxis()
    axes[0][0].set_ylabel("times faster than dense torch")
    handles = {
        text: handle
        for axis in axes[0]
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=7, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kept", type=float, nargs="*", default=[0.5, 0.3, 0.1])
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, for each row")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--without", nargs="*", default=[], help="columns to leave out")
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M's GGUF file")
    parser.add_argument("--chart", type=Path, help="draw a picture")
    parser.add_argument("--json", type=Path, help="keep the numbers; rows it has are skipped")
    parser.add_argument("--again", action="store_true", help="measure rows that --json has, too")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(given.threads)
    print(f"{given.threads} threads; load of the machine at the start: {os.getloadavg()[0]:.1f}\n")
    print(f"| network, milliseconds | kept | {' | '.join(COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, build in networks(given).items():
            if not given.only or name in given.only:
                title, model, x = build()
                rows += measure(title, model.eval(), x, given)
        if given.smollm2 and (not given.only or "decode" in given.only):
            rows += decoding(given.smollm2, given)
    print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f}")
    if given.chart:
        draw(saved(given.json) if given.json else rows, given.chart)


if __name__ == "__main__":
    main()
