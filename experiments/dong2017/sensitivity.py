"""Study the sensitivities of LeNet-300-100's first layer.

One figure shows their distribution, the other the pruning ratio against the tolerable error ε.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from experiments.dong2017 import pictures
from experiments.dong2017.first_layer import fc1
from experiments.dong2017.lab import Lab
from lobs.calibration.layer_problem import sensitivities
from lobs.solvers import GreedyOBS


def names() -> list[str]:
    """Return the two figures."""
    return ["sensitivity/histogram", "sensitivity/epsilon"]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen figures."""
    works = {"sensitivity/histogram": histogram, "sensitivity/epsilon": epsilon}
    done = []
    for name in rows:
        command = f"python -m experiments.dong2017 sensitivity --rows {name}" + (
            " --quick" if lab.quick else ""
        )
        done.append(lab.result(name.replace("/", "-"), lambda name=name: works[name](lab), command))
        (_draw_histogram if name.endswith("histogram") else _draw_epsilon)(lab, done[-1])
    return done


def histogram(lab: Lab) -> dict[str, Any]:
    """Count L_q on a log scale, and the share below 0.001.

    L_q is in the paper's units: half of the error of the deletion.
    """
    _, problem = fc1(lab)
    values, damping = sensitivities(problem)
    half = values / 2
    edges = torch.linspace(-12, 1, 66)
    counts = torch.histogram(half.clamp_min(1e-12).log10().float(), edges).hist
    return {
        "edges": edges.tolist(),
        "counts": [int(c) for c in counts],
        "damping": damping,
        "below_0.001_percent": round(100 * float((half < 1e-3).float().mean()), 2),
        "error_below_0.001_percent": round(100 * float((values < 1e-3).float().mean()), 2),
        "weights": len(values),
    }


def epsilon(lab: Lab) -> dict[str, Any]:
    """Return ε against the ratio removed, by the paper's rule √L_q and by the layer's own √E."""
    _, problem = fc1(lab)
    values, _ = sensitivities(problem)
    single = (values / 2).sort().values.sqrt()
    curve = GreedyOBS().path(problem).curve.clamp_min(0).sqrt()
    at = torch.linspace(0, 1, 201)
    published = [float(single[min(len(single) - 1, int(f * len(single)))]) for f in at]
    exact = [float(curve[min(len(curve) - 1, int(f * (len(curve) - 1)))]) for f in at]
    return {
        "ratio": (100 * at).tolist(),
        "single_weight_epsilon": published,
        "layer_epsilon": exact,
        "energy": math.sqrt(problem.energy),
    }


def _draw_histogram(lab: Lab, found: dict[str, Any]) -> None:
    figure, one = pictures.axes(
        "Sensitivity of LeNet-300-100's first layer",
        "log₁₀ L_q (the first bar holds all below 10⁻¹², always-black pixels above all)",
        "weights",
    )
    one.bar(found["edges"][:-1], found["counts"], width=0.2, align="edge", color="#1f77b4")
    one.axvline(
        -3,
        linestyle=":",
        color="black",
        label=f"0.001: {found['below_0.001_percent']:.1f} % lie below",
    )
    one.legend(fontsize=8)
    pictures.save(figure, lab.picture("sensitivity"))


def _draw_epsilon(lab: Lab, found: dict[str, Any]) -> None:
    curves = {
        "√L_q of the next weight (the paper's rule)": (
            found["single_weight_epsilon"],
            found["ratio"],
        ),
        "√E of the layer, exact deletion (corrected rule)": (
            found["layer_epsilon"],
            found["ratio"],
        ),
    }
    title = "Tolerable error against pruning ratio, first layer of LeNet-300-100"
    pictures.lines(
        lab.picture("epsilon"),
        curves,
        title=title,
        x="ε",
        y="removed (%)",
        xscale="log",
        xlim=(1e-4, None),
    )
