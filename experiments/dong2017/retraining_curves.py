"""Retrain LeNet-5 after LWC, L-OBS and greedy pruning at the paper's fractions.

Training uses labels and the original rate.
"""

from __future__ import annotations

from typing import Any

import lobs
from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab, errors, subject
from lobs import Sparsity, zoo
from lobs.training.retrain import retrain

METHODS = {"LWC": "magnitude", "L-OBS": "lobs", "greedy": "greedy"}


def names() -> list[str]:
    """Return one curve per method."""
    return [f"retraining/{short}" for short in METHODS.values()]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen curves and draw the picture."""
    done = []
    for short in (s for s in METHODS.values() if f"retraining/{s}" in rows):
        command = f"python -m experiments.dong2017 retraining --rows retraining/{short}" + (
            " --quick" if lab.quick else ""
        )
        done.append(
            lab.result(f"retraining-{short}", lambda short=short: curve(lab, short), command)
        )
    curves = {}
    for title, short in METHODS.items():
        found = lab.found(f"retraining-{short}")
        if found:
            curves[title] = ([i for i, _ in found["history"]], [e for _, e in found["history"]])
    if curves:
        title = "LeNet-5 at 54/43/6/25 % kept, labels, original rate"
        pictures.lines(
            lab.picture("retraining"), curves, title=title, x="iterations", y="test error (%)"
        )
    return done


def curve(lab: Lab, solver: str) -> dict[str, Any]:
    """Measure the test error every 20 iterations for 1,000 iterations."""
    who = subject("lenet5")
    target = Sparsity({name: 1 - kept for name, kept in zoo.entry("lenet5").paper_kept.items()})
    cut = lobs.prune(
        who.model, who.calibration(lab), target, solver=solver, inputs="dense", progress=False
    )
    recipe = zoo.entry("lenet5").recipe
    assert recipe is not None
    trained = retrain(
        cut.model, cut.masks, who.shuffled(recipe.batch_size), optimizer=recipe.optimizer, iterations=lab.few(1000, 40),
        evaluate=who.score, every=20, seed=lab.seed, progress=False,
    )  # fmt: skip
    dense = who.error(who.model)
    history = errors(trained.history)
    back = next((i for i, e in history if e <= dense + 0.1), None)
    return {
        "original": dense,
        "kept_percent": 100 * cut.kept_fraction,
        "history": history,
        "iterations_to_dense_plus_0.1": back,
    }
