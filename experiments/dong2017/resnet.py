"""ResNet-50 on ImageNet, all layers at one CR: top-1 and top-5 against the CR for magnitude, L-OBS, exact and the default method.

Statistics come from the training images in the data folder, accuracy from its validation images. The three layer-wise methods share one
pass of statistics; the default method is `lobs.prune` as anyone would call it.
"""

from __future__ import annotations

import copy
import resource
import time
from functools import cache
from typing import Any

import torch
from torch import nn

import lobs
from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab
from lobs import Problem, Sparsity, collect, solve, zoo
from lobs.calibrate import evaluating
from lobs.data import imagenet
from lobs.job import layer_problem
from lobs.layers import find_layers

NETWORK = "resnet50-v1"
METHODS = {"LWC": "magnitude", "L-OBS": "lobs", "exact": "exact", "default": "default"}
KEPT = (80, 70, 60, 50, 45, 40, 30)


def names() -> list[str]:
    """The dense network, then one row a method and CR, and one budget shared by all layers."""
    layerwise = [f"resnet50/{short}-{kept}" for short in METHODS.values() for kept in KEPT]
    return ["resnet50/dense", *layerwise, "resnet50/shared-30"]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """The chosen rows, by CR so that the picture grows from left to right, then the picture."""
    done = []
    for name in rows:
        command = f"lobs --data FOLDER reproduce resnet --rows {name}" + (" --quick" if lab.quick else "")
        done.append(lab.result(name, lambda name=name: row(lab, name.removeprefix("resnet50/")), command))
    _draw(lab)
    return done


def row(lab: Lab, name: str) -> dict[str, Any]:
    """Prune, then count right answers."""
    model = copy.deepcopy(_network())
    began = time.perf_counter()
    kept = 1.0
    if name != "dense":
        method, _, percent = name.rpartition("-")
        model, kept = _pruned(lab, method, int(percent) / 100)
    seconds = time.perf_counter() - began
    top1, top5, images = accuracy(model, _data("val", lab))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "kept_percent": 100 * kept,
        "top1": top1,
        "top5": top5,
        "images": images,
        "prune_seconds": round(seconds),
        "peak_gigabytes": peak,
    }


def _pruned(lab: Lab, method: str, keep: float) -> tuple[nn.Module, float]:
    if method in ("default", "shared"):
        extra: dict[str, Any] = {"scope": "network"} if method == "shared" else {}
        cut = lobs.prune(_network(), _data("train", lab), Sparsity(1 - keep, **extra), progress=False)
        return cut.model, cut.kept_fraction
    model = copy.deepcopy(_network())
    kept = total = 0
    for layer in find_layers(model):
        answer = solve(_problems(lab)[layer.name], method, 1 - keep)
        layer.write(answer.weight)
        kept, total = kept + answer.kept, total + answer.prunable
    return model, kept / total


@cache
def _network() -> nn.Module:
    return zoo.trained(NETWORK)


@cache
def _problems(lab: Lab) -> dict[str, Problem]:
    """Every layer's problem on the dense network's inputs, made once for all methods and CRs."""
    layers = find_layers(_network())
    calibration = collect(_network(), _data("train", lab), layers)
    return {layer.name: layer_problem(layer, layer.matrix(), calibration[layer.name]) for layer in layers}


def _data(split: Any, lab: Lab) -> imagenet.ImageNet:
    return imagenet.load(split, scaling="caffe", batch_size=25).batches(25, limit=lab.few(10**9, 8))


def accuracy(model: nn.Module, data: imagenet.ImageNet) -> tuple[float, float, int]:
    """Top-1 and top-5 accuracy in percent, and the number of images."""
    first = five = seen = 0
    with evaluating(model):
        for images, labels in data:
            best = model(images).topk(5).indices == labels.unsqueeze(1)
            first, five, seen = first + int(best[:, 0].sum()), five + int(best.any(dim=1).sum()), seen + len(labels)
    return 100 * first / seen, 100 * five / seen, seen


def _draw(lab: Lab) -> None:
    import json

    curves = {}
    for title, short in METHODS.items():
        files = [lab.path(f"resnet50/{short}-{kept}") for kept in KEPT]
        found = [json.loads(f.read_text()) for f in files if f.is_file()]
        if found:
            curves[title] = ([r["kept_percent"] for r in found], [r["top5"] for r in found])
    if curves:
        title = "ResNet-50, every layer at one CR, no retraining"
        pictures.lines(
            lab.picture("resnet50"), curves, title=title, x="kept (%)", y="top-5 accuracy (%)", marks={"the paper's 45 %": 45}
        )


def threads() -> int:
    """How many cores torch uses."""
    return torch.get_num_threads()
