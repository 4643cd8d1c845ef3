"""Prune the first layer of LeNet-300-100 alone, to the end.

Accuracy is measured every 100 deletions. The pruning inflection point is reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab, Subject, subject
from lobs import Problem, collect_moments
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers
from lobs.pruning.sweep import SweepPoint, inflection
from lobs.solvers import GreedyOBS, scores
from lobs.solvers.solution import removal_order

METHODS = {
    "Random": "random",
    "LWC": "magnitude",
    "ApoZW": "apozw",
    "L-OBS": "lobs",
    "greedy": "greedy",
}


def names() -> list[str]:
    """Return one curve per criterion."""
    return [f"first-layer/{short}" for short in METHODS.values()]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen curves and draw all that have a result."""
    done = []
    for short in (s for s in METHODS.values() if f"first-layer/{s}" in rows):
        command = f"python -m experiments.dong2017 first-layer --rows first-layer/{short}" + (
            " --quick" if lab.quick else ""
        )
        done.append(
            lab.result(f"first-layer-{short}", lambda short=short: curve(lab, short), command)
        )
    _draw(lab)
    return done


def fc1(lab: Lab) -> tuple[Subject, Problem]:
    """Return the network and its first layer's problem, on all training images."""
    who = subject("lenet300")
    layer = find_layers(who.model, "fc1")[0]
    moments = collect_moments(who.model, who.calibration(lab), ["fc1"])["fc1"]
    return who, layer_problem(layer, layer.matrix(), moments)


def curve(lab: Lab, method: str) -> dict[str, Any]:
    """Measure accuracy against the number of first-layer weights removed."""
    who, problem = fc1(lab)
    every = lab.few(2000 if method == "greedy" else 100, 12_000)
    counts = [*range(0, problem.prunable, every), problem.prunable]
    states = (
        _greedy(problem, counts)
        if method == "greedy"
        else _incremental(problem, method, counts, lab.seed)
    )
    found = [
        [count, 100 - _error(who, weight)] for count, weight in zip(counts, states, strict=True)
    ]
    points = [SweepPoint(c, 1 - c / problem.prunable, 0.0, accuracy) for c, accuracy in found]
    knee = inflection(points)
    return {
        "points": found,
        "prunable": problem.prunable,
        "every": every,
        "inflection_percent": None
        if knee is None
        else round(100 * knee.asked / problem.prunable, 2),
        "kept_accuracy_percent": round(
            max([100 * c / problem.prunable for c, a in found if a >= found[0][1] - 0.5]), 2
        ),
    }


def _error(who: Subject, matrix: Tensor) -> float:
    model = who.model
    kept = model.fc1.weight.detach().clone(), model.fc1.bias.detach().clone()
    with torch.no_grad():
        model.fc1.weight.copy_(matrix[:, :-1])
        model.fc1.bias.copy_(matrix[:, -1])
        wrong = who.error(model)
        model.fc1.weight.copy_(kept[0])
        model.fc1.bias.copy_(kept[1])
    return wrong


def _greedy(problem: Problem, counts: list[int]) -> Any:
    path = GreedyOBS().path(problem)
    return (path.cut(count).weight[0] for count in counts)


def _incremental(problem: Problem, method: str, counts: list[int], seed: int) -> Any:
    """Yield the weights after each count, deleting one by one.

    L-OBS also moves the rest of the row with its fixed inverse.
    """
    weight, _ = problem.groups[0]
    rows, d = weight.shape
    metric = problem.damped_metrics(first=1e-4)[0]
    score = {
        "random": lambda: scores.random(problem, seed)[0],
        "magnitude": lambda: scores.magnitude(problem)[0],
        "apozw": lambda: scores.apozw(problem)[0],
        "lobs": lambda: scores.obs(weight, metric),
    }[method]()
    order = removal_order(score, problem.protected)
    v, inverse, pivot = metric.scaled(weight).clone(), metric.inverse, metric.inverse.diagonal()
    mask = torch.ones(rows, d, dtype=torch.bool)
    done = 0
    for count in counts:
        for place in order[done:count].tolist():
            r, q = divmod(place, d)
            if method == "lobs":
                v[r] -= (v[r, q] / pivot[q]) * inverse[q]
            mask[r, q] = False
        done = count
        yield (
            metric.unscaled(v, weight, mask).to(weight.dtype) if method == "lobs" else weight * mask
        )


def _draw(lab: Lab) -> None:
    curves = {}
    for title, short in METHODS.items():
        found = lab.found(f"first-layer-{short}")
        if found:
            curves[title] = (
                [100 * c / found["prunable"] for c, _ in found["points"]],
                [a for _, a in found["points"]],
            )
    if curves:
        title, x = "LeNet-300-100, first layer pruned alone", "removed from the first layer (%)"
        pictures.lines(lab.picture("first-layer"), curves, title=title, x=x, y="test accuracy (%)")
