"""Prune ResNet-50 on ImageNet, all layers at one CR, with five methods.

Statistics come from `CALIBRATION` training images of the data folder. The rows in `CLOSELY` are
tested on its 3,000 validation images, the others on a third of them, spread over the classes. The
layer-wise methods share one pass of statistics on the dense network. "auto" is the default solver
there. "default" is `lobs.prune` with its defaults, at one CR for every layer. "shared" is one
budget for all layers, on dense inputs, with batch norms re-estimated.
"""

from __future__ import annotations

import copy
import time
from functools import cache
from typing import Any

from torch import nn

import lobs
from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab, peak_gigabytes
from lobs import Problem, Sparsity, collect_moments, solve, zoo
from lobs.calibration.forward import evaluating
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers
from lobs.solvers.greedy import DeletionPath, GreedyOBS
from lobs.zoo.datasets import imagenet

NETWORK = "resnet50-v1"
METHODS = {
    "LWC": "magnitude",
    "L-OBS": "lobs",
    "greedy": "greedy",
    "auto, dense inputs": "auto",
    "default": "default",
}
KEPT = (80, 70, 60, 50, 45, 40, 30)
# An image costs 15 G multiply-adds in calibration and 4 in testing.
CALIBRATION = 1000
VALIDATION, FEWER = 3000, 1000
CLOSELY = ("dense", "lobs-50", "greedy-50", "auto-50", "default-50", "default-30", "shared-30")


def names() -> list[str]:
    """Return the dense row, one row per method and CR, and the shared budget."""
    # "auto" is run only where it is compared with "default" and "shared".
    layerwise = [
        f"resnet50/{m}-{kept}"
        for m in METHODS.values()
        for kept in KEPT
        if m != "auto" or kept in (50, 30)
    ]
    return ["resnet50/dense", *layerwise, "resnet50/shared-30"]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen rows, then draw the picture."""
    done = []
    for name in rows:
        command = f"python -m experiments.dong2017 --data FOLDER resnet --rows {name}" + (
            " --quick" if lab.quick else ""
        )
        done.append(
            lab.result(name, lambda name=name: row(lab, name.removeprefix("resnet50/")), command)
        )
    _draw(lab)
    return done


def row(lab: Lab, name: str) -> dict[str, Any]:
    """Prune, then count right answers."""
    model, facts = (
        (_network(), {"kept_percent": 100.0})
        if name == "dense"
        else _pruned(lab, *name.rsplit("-", 1))
    )
    began = time.perf_counter()
    right = answers(model, _data("val", lab, VALIDATION if name in CLOSELY else FEWER))
    return {
        **facts,
        "top1": 100 * sum(a == 1 for a in right) / len(right),
        "top5": 100 * sum(a > 0 for a in right) / len(right),
        "images": len(right),
        # One digit per image, see `answers`. Rows are compared on the same images.
        "right": "".join(map(str, right)),
        "test_seconds": round(time.perf_counter() - began),
        "peak_gigabytes": peak_gigabytes(),
    }


def _pruned(lab: Lab, method: str, percent: str) -> tuple[nn.Module, dict[str, Any]]:
    removed = 1 - int(percent) / 100
    began = time.perf_counter()
    if method in ("default", "shared"):
        target = Sparsity(removed, scope="layer")
        options: dict[str, Any] = {"refit": "layers"}  # `benchmarks.resnet50` refits blocks
        if method == "shared":
            target, options = Sparsity(removed, scope="network", rounds=1), {"inputs": "dense"}
        cut = lobs.prune(
            _network(), _data("train", lab, CALIBRATION), target, progress=False, **options
        )
        kept = {layer.name: round(100 * layer.kept / layer.total, 2) for layer in cut.layers}
        seconds = {
            "calibration_seconds": cut.settings["calibration seconds"],
            "prune_seconds": round(time.perf_counter() - began),
        }
        return cut.model, {
            "kept_percent": 100 * cut.kept_fraction,
            **seconds,
            "settings": cut.settings,
            "layers": kept,
        }
    problems, calibrated = _problems(lab)
    paths, swept = _paths(lab) if method == "greedy" else ({}, 0.0)
    began = time.perf_counter()
    model = copy.deepcopy(_network())
    found = {}
    for layer in find_layers(model):
        name = layer.name
        found[name] = (
            paths[name].solve(Sparsity(removed))
            if paths
            else solve(problems[name], method, lobs.Sparsity(removed))
        )
        layer.write(found[name].weight)
    kept = 100 * sum(s.kept for s in found.values()) / sum(s.prunable for s in found.values())
    seconds = {
        "calibration_seconds": round(calibrated),
        "prune_seconds": round(calibrated + swept + time.perf_counter() - began),
    }
    return model, {
        "kept_percent": kept,
        **seconds,
        "settings": {"solver": method, "samples": lab.few(CALIBRATION, 8)},
    }


@cache
def _network() -> nn.Module:
    return zoo.trained(NETWORK)


@cache
def _problems(lab: Lab) -> tuple[dict[str, Problem], float]:
    """Return every layer's problem on the dense network's inputs, and the seconds it took.

    The problems serve all methods and CRs.
    """
    began = time.perf_counter()
    layers = find_layers(_network())
    calibration = collect_moments(_network(), _data("train", lab, CALIBRATION), layers)
    problems = {
        layer.name: layer_problem(layer, layer.matrix(), calibration[layer.name])
        for layer in layers
    }
    return problems, time.perf_counter() - began


@cache
def _paths(lab: Lab) -> tuple[dict[str, DeletionPath], float]:
    """Return every layer's deletions to the end, for all CRs, and the seconds they took."""
    began = time.perf_counter()
    paths = {name: GreedyOBS().path(problem) for name, problem in _problems(lab)[0].items()}
    return paths, time.perf_counter() - began


def _data(split: Any, lab: Lab, images: int) -> imagenet.ImageNet:
    return imagenet.load(split, scaling="caffe", batch_size=25).batches(
        25, limit=lab.few(images, 8)
    )


def answers(model: nn.Module, data: imagenet.ImageNet) -> list[int]:
    """Return for every image 1 if the first answer is right, 5 if one of five is, else 0."""
    found: list[int] = []
    with evaluating(model):
        for images, labels in data:
            best = model(images).topk(5).indices == labels.unsqueeze(1)
            found += [
                1 if first else 5 if five else 0
                for first, five in zip(best[:, 0], best.any(dim=1), strict=True)
            ]
    return found


def _draw(lab: Lab) -> None:
    curves = {}
    for title, short in METHODS.items():
        found = [r for kept in KEPT if (r := lab.found(f"resnet50/{short}-{kept}")) is not None]
        if found:
            curves[title] = ([r["kept_percent"] for r in found], [_top5(r) for r in found])
    shared = lab.found("resnet50/shared-30")
    if shared is not None:
        curves["auto, one budget"] = ([shared["kept_percent"]], [_top5(shared)])
    if curves:
        title = "ResNet-50, every layer at one CR, no retraining"
        pictures.lines(
            lab.picture("resnet50"),
            curves,
            title=title,
            x="kept (%)",
            y="top-5 accuracy (%)",
            marks={"the paper's 45 %": 45},
        )


def _top5(row: dict[str, Any]) -> float:
    """Return top-5 accuracy on the images that all rows were tested on."""
    right = row["right"][:: max(1, row["images"] // FEWER)]
    return 100 * sum(answer != "0" for answer in right) / len(right)
