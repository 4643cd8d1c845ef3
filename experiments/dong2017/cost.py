"""Measure time and peak memory on AlexNet and VGG-16 at real size.

The paper took 2.9 and 10.2 hours on 48 CPUs. Cost does not depend on the weights. Without a
checkpoint in the data folder, seeded random weights are used and errors are not reported. Every
layer keeps the same fraction; all else is default. VGG-16's first fully-connected layer has 25,088
inputs. Its Ψ takes 5 GB in double precision, so one single-precision copy is kept
(`lobs.calibration.wide`).
"""

from __future__ import annotations

import time
from typing import Any

import torch

import lobs
from experiments.dong2017.lab import Lab, peak_gigabytes
from lobs import Sparsity, zoo
from lobs.errors import LobsError
from lobs.zoo.datasets import imagenet

KEPT = {"alexnet": 0.11, "vgg16": 0.075}
# Calibration takes 60 G multiply-adds per image on VGG-16, and 3 on AlexNet.
IMAGES = {"alexnet": 1000, "vgg16": 100}
PAPER_HOURS = {"alexnet": 2.9, "vgg16": 10.2}


def names() -> list[str]:
    """Return one row per network."""
    return [f"cost/{name}" for name in KEPT]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen rows."""
    done = []
    for name in rows:
        command = f"python -m experiments.dong2017 --data FOLDER cost --rows {name}" + (
            " --quick" if lab.quick else ""
        )
        done.append(
            lab.result(name, lambda name=name: row(lab, name.removeprefix("cost/")), command)
        )
    return done


def row(lab: Lab, name: str) -> dict[str, Any]:
    """Prune with the defaults, timed."""
    try:
        model, weights = zoo.trained(name), "trained"
    except LobsError:
        model, weights = zoo.fresh(name, lab.seed).eval(), "seeded random"
    images = lab.few(IMAGES[name], 4)
    data = imagenet.load("train", batch_size=25).batches(25, limit=images)
    # The quick version prunes the first convolution only: fully-connected layers take gigabytes.
    only = (
        [n for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d)][:1]
        if lab.quick
        else None
    )
    began = time.perf_counter()
    cut = lobs.prune(
        model, data, Sparsity(1 - KEPT[name], scope="layer"), layers=only, progress=False
    )
    return {
        "network": name,
        "weights": weights,
        "kept_percent": 100 * cut.kept_fraction,
        "images": images,
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "peak_gigabytes": peak_gigabytes(),
        "paper_hours": PAPER_HOURS[name],
        "settings": cut.settings,
    }
