"""Reproduce Table 1: errors after pruning and after retraining, and iterations.

Baselines keep the fractions per layer that Han et al. (2015) publish. They are retrained at a tenth
of the original rate, as in the paper. Retraining stops at the paper's distance to the dense error,
or after `_CAP` iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lobs
from experiments.dong2017 import few_iterations
from experiments.dong2017.lab import (
    STAGED_RATES,
    Lab,
    Subject,
    errors,
    light,
    light_settings,
    stage_row,
    subject,
)
from experiments.dong2017.surgery import Surgery, operate, threshold_c
from lobs import Sparsity, zoo
from lobs.training.objectives import sgd
from lobs.training.retrain import retrain
from lobs.training.staged import Stage, prune_in_stages

HAN = {
    "lenet300": {"fc1": 0.08, "fc2": 0.09, "fc3": 0.26},
    "lenet5": {"conv1": 0.66, "conv2": 0.12, "fc1": 0.08, "fc2": 0.19},
    "cifarnet": {"*": 0.09},
    "cifarnet-wide": zoo.entry("cifarnet-wide").paper_kept,
}
STAGES = {
    "lenet300": ({"fc1": 0.07, "fc2": 0.20, "fc3": 0.70}, {"fc1": 0.01, "fc2": 0.04, "fc3": 0.54}),
    "lenet5": (
        {"conv1": 0.60, "conv2": 0.60, "fc1": 0.06, "fc2": 0.30},
        {"conv1": 0.20, "conv2": 0.01, "fc1": 0.009, "fc2": 0.08},
    ),
}
# Thresholds of dynamic surgery keep this fraction of the dense weights. Training then moves
# magnitudes.
DNS_START = {
    "lenet300": {"fc1": 0.012, "fc2": 0.05, "fc3": 0.35},
    "lenet5": {"conv1": 0.14, "conv2": 0.02, "fc1": 0.005, "fc2": 0.05},
}
# Kept fractions of the stages of our method, as multiples of the last. Chosen by tuning.py.
OURS_STAGES = (8.0, 5.0, 3.3, 2.3, 1.7, 1.3, 1.0)
# Largest number of iterations, about an hour of one core. Dynamic surgery runs as long as the
# paper's instead, because its masks move until its end.
_CAP = {"lenet300": 350_000, "lenet5": 10_000, "cifarnet": 1_020, "cifarnet-wide": 1_020}


@dataclass(frozen=True)
class Paper:
    """Hold the paper's numbers; None where it prints none.

    They are dense error, kept %, error after pruning, error after retraining, and iterations.
    """

    dense: float
    kept: float
    pruned: float | None
    retrained: float | None
    iterations: float | None


@dataclass(frozen=True)
class Row:
    """Hold one line of the table."""

    name: str
    method: str
    network: str
    paper: Paper | None
    work: Callable[[Lab, Row], dict[str, Any]]


def _kept(table: dict[str, float]) -> Sparsity:
    return Sparsity({name: 1 - kept for name, kept in table.items()})


def _after(
    who: Subject, lab: Lab, model: Any, masks: Any, kept: float, **more: Any
) -> dict[str, Any]:
    return {
        "original": who.error(who.model),
        "kept_percent": 100 * kept,
        "pruned": who.error(model),
        **more,
    }


def baseline(solver: str) -> Callable[[Lab, Row], dict[str, Any]]:
    """Prune by a score, then retrain with labels at a tenth of the original rate."""

    def work(lab: Lab, row: Row) -> dict[str, Any]:
        who = subject(row.network)
        cut = lobs.prune(
            who.model,
            who.calibration(lab),
            _kept(HAN[row.network]),
            solver=solver,
            inputs="dense",
            progress=False,
        )
        found = _after(who, lab, cut.model, cut.masks, cut.kept_fraction, settings=cut.settings)
        assert row.paper is not None and row.paper.retrained is not None
        wanted = found["original"] + row.paper.retrained - row.paper.dense
        recipe = zoo.entry(row.network).recipe
        assert recipe is not None
        trained = retrain(
            cut.model, cut.masks, who.shuffled(recipe.batch_size), optimizer=sgd(recipe.learning_rate / 10, weight_decay=recipe.weight_decay),
            iterations=lab.few(_CAP[row.network], 100), until_score=-wanted, evaluate=who.score, every=lab.few(250, 50), seed=lab.seed, progress=False,
        )  # fmt: skip
        note = (
            ""
            if trained.reached
            else f"stopped at {trained.iterations} iterations without reaching {wanted:.2f}"
        )
        return {
            **found,
            "retrained": errors(trained.history)[-1][1],
            "iterations": trained.iterations,
            "history": errors(trained.history),
            "note": note,
        }

    return work


def surgery(lab: Lab, row: Row) -> dict[str, Any]:
    """Run dynamic network surgery for the paper's number of iterations.

    The rate is the zoo's, with a cosine decay.
    """
    import math

    who = subject(row.network)
    assert row.paper is not None and row.paper.iterations is not None
    weights = {
        name: module.weight
        for name, module in who.model.named_modules()
        if hasattr(module, "weight")
    }
    rule = Surgery(
        {name: threshold_c(weights[name], kept) for name, kept in DNS_START[row.network].items()},
        decay=lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
    )
    recipe = zoo.entry(row.network).recipe
    assert recipe is not None
    iterations = int(row.paper.iterations)
    done = operate(
        who.model, who.shuffled(recipe.batch_size), rule, iterations=lab.few(iterations, 200),
        optimizer=sgd(recipe.learning_rate, weight_decay=recipe.weight_decay),
        evaluate=who.error, every=lab.few(1000, 100), seed=lab.seed,
    )  # fmt: skip
    return {
        "original": who.error(who.model), "kept_percent": 100 * done.kept_fraction, "pruned": None, "retrained": who.error(done.model),
        "iterations": done.iterations, "history": done.history,
    }  # fmt: skip


def once(
    solver: str | None,
    keep: str | float,
    iterations: int,
    *,
    original_rate: bool = False,
    **pruning: Any,
) -> Callable[[Lab, Row], dict[str, Any]]:
    """Prune once, then retrain.

    Args:
        solver: a solver's name; None for the defaults.
        keep: the paper's fractions ("paper"), Han's ("han"), or one number.
        iterations: iterations of retraining.
        original_rate: retrain with labels at the original rate instead of lightly.
        **pruning: further options of `prune`.
    """

    def work(lab: Lab, row: Row) -> dict[str, Any]:
        who = subject(row.network)
        tables = {"paper": zoo.entry(row.network).paper_kept, "han": HAN.get(row.network, {})}
        target = _kept(tables[keep]) if isinstance(keep, str) else Sparsity(1 - keep)
        options: dict[str, Any] = {} if solver is None else {"solver": solver, "inputs": "dense"}
        cut = lobs.prune(
            who.model, who.calibration(lab), target, progress=False, **options, **pruning
        )
        found = _after(
            who,
            lab,
            cut.model,
            cut.masks,
            cut.kept_fraction,
            prune_seconds=round(cut.seconds, 1),
            settings=cut.settings,
        )
        steps = lab.few(iterations, min(iterations, 60))
        if not steps:
            return {**found, "retrained": None, "iterations": 0}
        if original_rate:
            recipe = zoo.entry(row.network).recipe
            assert recipe is not None
            rate = sgd(recipe.learning_rate, weight_decay=recipe.weight_decay)
            data = who.shuffled(recipe.batch_size)
            trained = retrain(
                cut.model,
                cut.masks,
                data,
                optimizer=rate,
                iterations=steps,
                evaluate=who.score,
                seed=lab.seed,
                progress=False,
            )
        else:
            trained = light(who, cut.model, cut.masks, steps, lab.seed)
        return {
            **found,
            "retrained": errors(trained.history)[-1][1],
            "iterations": trained.iterations,
            "history": errors(trained.history),
        }

    return work


def staged(
    iterations: tuple[int, ...], *, keep: float | None = None
) -> Callable[[Lab, Row], dict[str, Any]]:
    """Prune in stages with light retraining.

    Without `keep` this is the published method in its two stages. With it, our method goes down to
    `keep` of the network.
    """

    def work(lab: Lab, row: Row) -> dict[str, Any]:
        who = subject(row.network)
        counts = [lab.few(n, 20) for n in iterations]
        if keep is None:
            plan = [
                Stage(_kept(table), n) for table, n in zip(STAGES[row.network], counts, strict=True)
            ]
            pruning: dict[str, Any] = {"solver": "lobs", "inputs": "dense"}
        else:
            shares = OURS_STAGES if len(counts) > 1 else (1.0,)
            plan = [
                Stage(Sparsity(1 - keep * share, scope="network"), n)
                for share, n in zip(shares, counts, strict=True)
            ]
            pruning = {}
        settings = light_settings(who, lab.seed, STAGED_RATES)
        done = prune_in_stages(
            who.model, who.calibration(lab), who.shuffled(512), plan, evaluate=who.score, pruning=pruning,
            retraining={**settings, "every": 50}, progress=False,
        )  # fmt: skip
        last, rows = done.stages[-1], [stage_row(stage) for stage in done.stages]
        return {
            "original": who.error(who.model), "kept_percent": 100 * last.kept_fraction, "pruned": rows[-1]["pruned_error"], "retrained": rows[-1]["error"],
            "iterations": done.iterations, "stages": rows,
            "settings": {"pruning": pruning or "defaults", "samples": sum(len(y) for _, y in who.calibration(lab)), "stages": list(map(repr, plan))},
        }  # fmt: skip

    return work


_L3, _L5, _CN, _CW = "lenet300", "lenet5", "cifarnet", "cifarnet-wide"
ROWS = [
    Row("lenet300/random", "Random", _L3, Paper(1.76, 8, 85.72, 2.25, 3.5e5), baseline("random")),
    Row(
        "lenet300/obd",
        "OBD (Fisher diagonal)",
        _L3,
        Paper(1.76, 8, 86.72, 1.96, 8.1e4),
        baseline("obd-fisher"),
    ),
    Row("lenet300/lwc", "LWC", _L3, Paper(1.76, 8, 81.32, 1.95, 1.4e5), baseline("magnitude")),
    Row("lenet300/dns", "DNS", _L3, Paper(1.76, 1.8, None, 1.99, 3.4e4), surgery),
    Row("lenet300/lobs", "L-OBS", _L3, Paper(1.76, 7, 3.10, 1.82, 510), once("lobs", "paper", 510)),
    Row(
        "lenet300/lobs-original-rate",
        "L-OBS, labels at the original rate",
        _L3,
        None,
        once("lobs", "paper", 510, original_rate=True),
    ),
    Row(
        "lenet300/lobs-iterative",
        "L-OBS (iterative)",
        _L3,
        Paper(1.76, 1.5, 2.43, 1.96, 643),
        staged((300, 343)),
    ),
    Row("lenet300/greedy", "greedy, the paper's CRs", _L3, None, once("greedy", "paper", 0)),
    Row(
        "lenet300/greedy-light", "greedy, light retraining", _L3, None, once("greedy", "paper", 510)
    ),
    Row("lenet300/default", "default, 7 %", _L3, None, once(None, 0.07, 0)),
    Row(
        "lenet300/by-layer",
        "default, 7 %, each layer by itself",
        _L3,
        None,
        once(None, 0.07, 0, refit="layers"),
    ),
    Row(
        "lenet300/default-light", "default, 7 %, light retraining", _L3, None, once(None, 0.07, 510)
    ),
    Row("lenet300/default-1.5", "default, 1.5 %", _L3, None, once(None, 0.015, 0)),
    Row(
        "lenet300/ours-1.5",
        "shared budget, 1.5 %, one stage",
        _L3,
        None,
        staged((643,), keep=0.015),
    ),
    Row(
        "lenet300/ours-staged-1.5",
        "shared budget, 1.5 %, stages",
        _L3,
        None,
        staged((64,) * 6 + (259,), keep=0.015),
    ),
    Row(
        "lenet300/ours-long-2",
        "shared budget, 2 %, stages, 10,000",
        _L3,
        None,
        staged((1000,) * 6 + (4000,), keep=0.02),
    ),
    Row(
        "lenet300/ours-long-1.75",
        "shared budget, 1.75 %, stages, 10,000",
        _L3,
        None,
        staged((1000,) * 6 + (4000,), keep=0.0175),
    ),
    Row(
        "lenet300/ours-long-1.5",
        "shared budget, 1.5 %, stages, 10,000",
        _L3,
        None,
        staged((1000,) * 6 + (4000,), keep=0.015),
    ),
    Row(
        "lenet300/ours-long-1",
        "shared budget, 1 %, stages, 10,000",
        _L3,
        None,
        staged((1000,) * 6 + (4000,), keep=0.01),
    ),
    Row(
        "lenet5/obd",
        "OBD (Fisher diagonal)",
        _L5,
        Paper(1.27, 8, 86.72, 2.65, 2.9e5),
        baseline("obd-fisher"),
    ),
    Row("lenet5/lwc", "LWC", _L5, Paper(1.27, 8, 89.55, 1.36, 9.6e4), baseline("magnitude")),
    Row("lenet5/dns", "DNS", _L5, Paper(1.27, 0.9, None, 1.36, 4.7e4), surgery),
    Row("lenet5/lobs", "L-OBS", _L5, Paper(1.27, 7, 3.21, 1.27, 740), once("lobs", "paper", 740)),
    Row(
        "lenet5/lobs-iterative",
        "L-OBS (iterative)",
        _L5,
        Paper(1.27, 0.9, 2.04, 1.66, 841),
        staged((400, 441)),
    ),
    Row("lenet5/greedy", "greedy, the paper's CRs", _L5, None, once("greedy", "paper", 0)),
    Row("lenet5/greedy-light", "greedy, light retraining", _L5, None, once("greedy", "paper", 740)),
    Row("lenet5/default", "default, 7 %", _L5, None, once(None, 0.07, 0)),
    Row(
        "lenet5/by-layer",
        "default, 7 %, each layer by itself",
        _L5,
        None,
        once(None, 0.07, 0, refit="layers"),
    ),
    Row("lenet5/default-light", "default, 7 %, light retraining", _L5, None, once(None, 0.07, 740)),
    Row("lenet5/default-0.9", "default, 0.9 %", _L5, None, once(None, 0.009, 0)),
    Row(
        "lenet5/ours-0.9", "shared budget, 0.9 %, one stage", _L5, None, staged((841,), keep=0.009)
    ),
    Row(
        "lenet5/ours-staged-0.9",
        "shared budget, 0.9 %, stages",
        _L5,
        None,
        staged((84,) * 6 + (337,), keep=0.009),
    ),
    Row(
        "lenet5/ours-long-0.5",
        "shared budget, 0.5 %, stages, 10,000",
        _L5,
        None,
        staged((1000,) * 6 + (4000,), keep=0.005),
    ),
    Row(
        "lenet5/ours-long-0.3",
        "shared budget, 0.3 %, stages, 10,000",
        _L5,
        None,
        staged((1000,) * 6 + (4000,), keep=0.003),
    ),
    Row("cifarnet/lwc", "LWC", _CN, Paper(18.57, 9, 87.65, 19.36, 1.62e5), baseline("magnitude")),
    Row(
        "cifarnet/lobs",
        "L-OBS",
        _CN,
        Paper(18.57, 9, 21.32, 18.76, 1020),
        once("lobs", "han", 1020),
    ),
    Row("cifarnet/greedy", "greedy, 9 % of every layer", _CN, None, once("greedy", "han", 0)),
    Row("cifarnet/default", "default, 9 %", _CN, None, once(None, 0.09, 0)),
    Row(
        "cifarnet/default-light",
        "default, 9 %, light retraining",
        _CN,
        None,
        once(None, 0.09, 1020),
    ),
    Row(
        "cifarnet-wide/lwc",
        "LWC",
        _CW,
        Paper(18.57, 9, 87.65, 19.36, 1.62e5),
        baseline("magnitude"),
    ),
    Row(
        "cifarnet-wide/lobs",
        "L-OBS",
        _CW,
        Paper(18.57, 9, 21.32, 18.76, 1020),
        once("lobs", "paper", 1020),
    ),
    Row(
        "cifarnet-wide/lobs-shared",
        "L-OBS, 9 % shared out as by default",
        _CW,
        None,
        once("lobs", 0.09, 0),
    ),
    Row(
        "cifarnet-wide/greedy",
        "greedy, as much of each layer as L-OBS",
        _CW,
        None,
        once("greedy", "paper", 0),
    ),
    Row("cifarnet-wide/default", "default, 9 %", _CW, None, once(None, 0.09, 0)),
    Row(
        "cifarnet-wide/default-light",
        "default, 9 %, light retraining",
        _CW,
        None,
        once(None, 0.09, 1020),
    ),
]


def names() -> list[str]:
    """Return the rows that `--rows` chooses from."""
    return [row.name for row in ROWS]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen rows that have no result."""
    done = []
    for row in (r for r in ROWS if r.name in rows):
        command = f"python -m experiments.dong2017 table1 --rows {row.name}" + (
            " --quick" if lab.quick else ""
        )
        done.append(lab.result(f"table1-{row.name}", lambda row=row: row.work(lab, row), command))
    for network in {row.network for row in ROWS if row.name in rows}:
        few_iterations.draw(lab, network)
    return done
