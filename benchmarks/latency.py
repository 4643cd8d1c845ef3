"""Time pruned networks: dense torch against `lobs.accelerate`, in turns.

    python -m benchmarks.latency [--threads 1] [--seconds 1]
        [--only kernel convs lenet300 lenet5 linear layers]

Prints best runs, and medians with 95 % intervals.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import torch
from torch import nn

import lobs
from lobs import NumericalWarning, Sparsity, zoo
from lobs.deploy.accelerate import take_turns
from lobs.deploy.accelerate.engines import ConvEngine
from lobs.deploy.accelerate.native import BitMatrix, SlotMatrix, multiply, multiply_slots
from lobs.zoo.datasets import mnist

LAYERS = {  # name: (layer, input of one image, kept)
    "AlexNet fc6, 9 % kept": (lambda: nn.Linear(9216, 4096), (9216,), 0.09),
    "ResNet-50 layer1 3×3, 10 % kept": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 56, 56), 0.1),
    "ResNet-50 layer3 3×3, 10 % kept": (
        lambda: nn.Conv2d(256, 256, 3, padding=1),
        (256, 14, 14),
        0.1,
    ),
    "ResNet-50 layer3 1×1, 10 % kept": (lambda: nn.Conv2d(1024, 256, 1), (1024, 14, 14), 0.1),
    "ResNet-50 layer4 3×3, 10 % kept": (
        lambda: nn.Conv2d(512, 512, 3, padding=1),
        (512, 7, 7),
        0.1,
    ),
    "ResNet-50 layer3 3×3, 30 % kept": (
        lambda: nn.Conv2d(256, 256, 3, padding=1),
        (256, 14, 14),
        0.3,
    ),
}


def show(title, model, x, seconds):
    """Print one row.

    A busy machine interrupts long calls and spares short ones, so the best runs are compared too.
    """
    done = lobs.accelerate(model, x, seconds=seconds, progress=False)
    with torch.no_grad():
        samples = take_turns(
            {"dense": lambda: model(x), "fast": lambda: done.model(x)}, 2 * seconds, 81
        )
    dense, fast = (float(samples[name].min()) * 1e6 for name in ("dense", "fast"))
    chosen = "dense" if done.note else done.layers[-1].chosen
    best = f"{dense:,.0f} | {fast:,.0f} | {dense / fast if not done.note else 1:.2f}"
    print(f"| {title} | {len(x)} | {best} | {done.speedup:.2f} | {chosen} |", flush=True)
    return done.summary()


def kernel(seconds: float) -> None:
    """Print both kernels for few inputs on a layer of 4096×4096 beside what the bytes allow."""
    forms = {"bit masks": (BitMatrix, multiply)}
    if SlotMatrix.holds(4096):
        forms["slots"] = (SlotMatrix, multiply_slots)
    titles = "".join(f" {name} ms | ratio | bytes allow | memory |" for name in forms)
    print(f"| kept | values | batch | dense ms |{titles}")
    print("|---" * (4 + 4 * len(forms)) + "|")
    for kept in (0.5, 0.3, 0.2, 0.1):
        layer = thinned(nn.Linear(4096, 4096), kept)
        dense, bias = layer.weight.nbytes, layer.bias.detach()
        for values in ("float32", "float16", "bfloat16", "int8", "int4"):
            packed = {name: form.pack(layer.weight, values) for name, (form, _) in forms.items()}
            for batch in (1, 4, 16) if values in ("float32", "float16") else (1,):
                x = torch.randn(batch, 4096)
                runs = {"dense": partial(layer, x)}
                for name, (_, product) in forms.items():
                    runs[name] = partial(product, packed[name], x, bias)
                with torch.no_grad():
                    samples = take_turns(runs, seconds, 99)
                best = {name: float(samples[name].min()) * 1e3 for name in runs}
                cells = "".join(
                    f" {best[name]:.2f} | {best['dense'] / best[name]:.2f} "
                    f"| {dense / m.nbytes:.2f} | {m.nbytes / dense:.2f} |"
                    for name, m in packed.items()
                )
                row = f"| {kept:.0%} | {values} | {batch} | {best['dense']:.2f} |{cells}"
                print(row, flush=True)


CONVS = {  # name: (channels in, channels out, kernel, positions a side)
    "layer1 3×3": (64, 64, 3, 56),
    "layer2 3×3": (128, 128, 3, 28),
    "layer3 3×3": (256, 256, 3, 14),
    "layer2 1×1": (512, 128, 1, 28),
    "layer3 1×1": (1024, 256, 1, 14),
}


def convs(seconds: float) -> None:
    """Print convolutions of ResNet-50: single zeros, and zeros in blocks of four rows."""
    print("| convolution | kept | batch | dense ms | single zeros | blocks 2×1 | blocks 4×1 |")
    print("|---|---|---|---|---|---|---|")
    for name, (inputs, outputs, size, side) in CONVS.items():
        for kept in (0.1, 0.2, 0.3, 0.4):
            for batch in (1, 8):
                x = torch.randn(batch, inputs, side, side)
                with torch.no_grad():
                    runs = {}
                    for block in (1, 2, 4):
                        conv = nn.Conv2d(inputs, outputs, size, padding=size // 2)
                        conv = thinned(conv, kept, block).eval().requires_grad_(False)
                        engine = ConvEngine([conv], x)
                        assert torch.allclose(engine.run(x), conv(x), rtol=1e-3, atol=1e-3)
                        runs[block] = partial(engine.run, x)
                    runs["dense"] = partial(conv, x)
                    samples = take_turns(runs, seconds, 99)
                best = {key: float(taken.min()) * 1e3 for key, taken in samples.items()}
                cells = " | ".join(f"{best['dense'] / best[b]:.2f}×" for b in (1, 2, 4))
                print(
                    f"| {name} | {kept:.0%} | {batch} | {best['dense']:.2f} | {cells} |", flush=True
                )


def thinned(layer, kept, block=1):
    torch.manual_seed(0)
    with torch.no_grad():
        shape = len(layer.weight) // block, *layer.weight.shape[1:]
        gone = torch.rand(shape) >= kept
        layer.weight.masked_fill_(gone.repeat_interleave(block, 0), 0)
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=["lenet300", "lenet5", "linear", "layers"])
    given = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)
    if given.threads:
        torch.set_num_threads(given.threads)
    print(f"{torch.get_num_threads()} threads\n")
    print(
        "| network or layer | batch | dense µs, best | accelerated µs, best | ratio | ratio of "
        "medians, 95 % | chosen |"
    )
    print("|---|---|---|---|---|---|---|")
    details = []
    if "kernel" in given.only:
        kernel(given.seconds)
    if "convs" in given.only:
        convs(given.seconds)
    for name in ("lenet300", "lenet5"):
        if name in given.only:
            images = mnist.load("test").images
            train = mnist.load("train").batches(limit=5000)
            pruned = lobs.prune(
                zoo.trained(name), train, Sparsity(0.97, scope="network"), progress=False
            ).model
            title = f"{zoo.entry(name).title}, 3 % kept"
            details += [show(title, pruned, images[:batch], given.seconds) for batch in (1, 64)]
    if "linear" in given.only:
        for batch in (1, 64):
            layer = thinned(nn.Linear(4096, 4096), 0.05)
            show("Linear 4096×4096, 5 % kept", layer, torch.randn(batch, 4096), given.seconds)
    if "layers" in given.only:
        for title, (build, shape, kept) in LAYERS.items():
            for batch in (1, 16):
                layer = thinned(build(), kept)
                show(title, layer, torch.randn(batch, *shape), given.seconds)
    for text in details:
        print(f"\n{text}")


if __name__ == "__main__":
    main()
