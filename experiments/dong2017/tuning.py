"""Choose the settings of light retraining without the test set.

The network never saw 5,000 of the training images. Its error on them decides. The rows are rates
for L-OBS at the paper's fractions (510 iterations), then rates and stages for 1.5 % kept (643).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import lobs
from experiments.dong2017.lab import Lab, Subject, errors, stage_row
from lobs import Sparsity, zoo
from lobs.training.objectives import distillation
from lobs.training.retrain import retrain
from lobs.training.staged import Stage, prune_in_stages
from lobs.zoo.datasets import mnist
from lobs.zoo.datasets.labelled import LabelledImages
from lobs.zoo.training import train

RATES = (1e-3, 2e-3, 5e-3)
PLANS: dict[str, tuple[tuple[float, int], ...]] = {
    "1-stage": ((1.0, 643),),
    "2-stages": ((3.0, 160), (1.0, 483)),
    "4-stages": ((6.0, 107), (3.0, 107), (1.6, 107), (1.0, 322)),
    "7-stages": ((8.0, 64), (5.0, 64), (3.3, 64), (2.3, 64), (1.7, 64), (1.3, 64), (1.0, 259)),
}


def names() -> list[str]:
    """Return the rates, then the plans."""
    return [f"tuning/rate-{rate:g}" for rate in RATES] + [
        f"tuning/{plan}-{rate:g}" for plan in PLANS for rate in (2e-3, 5e-3)
    ]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen rows."""
    done = []
    for name in rows:
        command = f"python -m experiments.dong2017 tuning --rows {name}" + (
            " --quick" if lab.quick else ""
        )
        done.append(
            lab.result(name, lambda name=name: row(lab, name.removeprefix("tuning/")), command)
        )
    return done


@cache
def _network(quick: bool) -> Subject:
    """Train LeNet-300-100 with another seed on 55,000 images.

    The other 5,000 replace the test set.
    """
    full = mnist.load("train")
    seen = LabelledImages(full.images[:55_000], full.labels[:55_000])
    kept_back = LabelledImages(full.images[55_000:], full.labels[55_000:])
    recipe = zoo.entry("lenet300").recipe
    assert recipe is not None
    some = LabelledImages(seen.images[:2000], seen.labels[:2000]) if quick else seen
    model = train(zoo.fresh("lenet300", 1), some, recipe, seed=1, progress=False)
    return Subject("lenet300", model, seen, kept_back.batches(1000))


def row(lab: Lab, name: str) -> dict[str, Any]:
    """Measure the error on the held-out images, before and after."""
    who = _network(lab.quick)
    plan, _, rate = (
        name.partition("-")
        if name.startswith("rate")
        else (*name.rsplit("-", 1)[:1], "", name.rsplit("-", 1)[1])
    )
    settings: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.Adam(parameters, float(rate)), "decay": "cosine", "teacher": who.model,
        "loss": distillation(2.0), "seed": lab.seed, "every": 10**6,
    }  # fmt: skip
    calibration, data = who.train.batches(1000, limit=lab.few(20_000, 2000)), who.shuffled(512)
    if plan == "rate":
        kept = zoo.entry("lenet300").paper_kept
        target = Sparsity({layer: 1 - share for layer, share in kept.items()})
        cut = lobs.prune(
            who.model, calibration, target, solver="lobs", inputs="dense", progress=False
        )
        done = retrain(
            cut.model,
            cut.masks,
            data,
            iterations=lab.few(510, 5),
            evaluate=who.score,
            progress=False,
            **settings,
        )
        return {
            "dense": who.error(who.model),
            "pruned": errors(done.history)[0][1],
            "retrained": errors(done.history)[-1][1],
            "iterations": done.iterations,
        }
    stages = [
        Stage(Sparsity(1 - 0.015 * share, scope="network"), lab.few(n, 2))
        for share, n in PLANS[plan]
    ]
    staged = prune_in_stages(
        who.model,
        calibration,
        data,
        stages,
        evaluate=who.score,
        retraining=settings,
        progress=False,
    )
    last = stage_row(staged.stages[-1])
    return {
        "dense": who.error(who.model),
        "pruned": last["pruned_error"],
        "retrained": last["error"],
        "iterations": staged.iterations,
    }
