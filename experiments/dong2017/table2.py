"""Reproduce Table 2: Net-Trim and L-OBS on the second layer of LeNet-300-100.

Nothing is retrained. Both see the first 2,000 training images, because each step of Net-Trim takes
a product with all samples. The memory figure is here too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab, Subject, subject
from experiments.dong2017.nettrim import moment_bytes, net_trim, quadratic_form_bytes
from lobs import Problem, Sparsity, collect_moments, solve
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers

# (method, kept %, the paper's ξ² and error)
ROWS = [
    ("nettrim", 19.0, 0.13, 13.24), ("nettrim", 7.4, 0.62, 28.45), ("nettrim", 4.2, 0.71, 47.69),
    ("lobs", 3.4, 0.70, 11.34), ("lobs", 3.8, 0.71, 10.83), ("lobs", 7.4, 0.37, 4.56),
    ("greedy", 3.4, None, None), ("greedy", 3.8, None, None), ("greedy", 7.4, None, None), ("greedy", 19.0, None, None),
]  # fmt: skip


def names() -> list[str]:
    """Return rows by method and kept percentage, and the figure."""
    return [f"table2/{method}-{kept:g}" for method, kept, _, _ in ROWS] + ["table2/memory"]


def run(lab: Lab, rows: list[str]) -> list[dict[str, Any]]:
    """Run the chosen rows, and draw memory against samples."""
    done = []
    for method, kept, xi, error in ROWS:
        name = f"table2/{method}-{kept:g}"
        if name in rows:
            command = f"python -m experiments.dong2017 table2 --rows {name}" + (
                " --quick" if lab.quick else ""
            )
            paper = {
                "method": method,
                "paper_xi_squared": xi,
                "paper_error": error,
                "paper_kept_percent": None if xi is None else kept,
            }
            done.append(
                lab.result(
                    name, lambda m=method, k=kept, p=paper: {**p, **line(lab, m, k)}, command
                )
            )
    if "table2/memory" in rows:
        done.append(
            lab.result(
                "table2/memory",
                memory,
                "python -m experiments.dong2017 table2 --rows table2/memory",
            )
        )
        _draw(lab, done[-1])
    return done


def line(lab: Lab, method: str, kept: float) -> dict[str, Any]:
    """Measure the relative error of the layer's ReLU outputs, and the test error.

    The other layers stay dense.
    """
    who, problem, inputs = _fc2(lab)
    weight = (
        _net_trim(lab, problem, inputs, kept)
        if method == "nettrim"
        else solve(problem, method, Sparsity(1 - kept / 100)).weight[0]
    )
    wanted, got = ((w.double() @ inputs).clamp_min(0) for w in (problem.weight[0], weight))
    xi = float((got - wanted).norm() / wanted.norm())
    nonzero = int((weight[:, :-1] != 0).sum())
    return {
        "kept_percent": 100 * nonzero / problem.prunable,
        "xi": xi,
        "xi_squared": xi**2,
        "pruned": _error(who, weight),
        "original": who.error(who.model),
        "samples": inputs.shape[1],
    }


def _fc2(lab: Lab) -> tuple[Subject, Problem, Tensor]:
    who = subject("lenet300")
    images = who.train.images[: lab.few(2_000, 1000)]
    with torch.no_grad():
        hidden = torch.relu(who.model.fc1(images.flatten(1)))
    layer = find_layers(who.model, "fc2")[0]
    moments = collect_moments(who.model, [images], ["fc2"])["fc2"]
    inputs = torch.cat([hidden, torch.ones(len(hidden), 1)], dim=1).T.double()
    return who, layer_problem(layer, layer.matrix(), moments), inputs


def _net_trim(lab: Lab, problem: Problem, inputs: Tensor, kept: float) -> Tensor:
    """Find, by bisection, the ξ that leaves this percentage.

    The program itself has no such target.
    """
    low, high = 0.0, 1.0
    best = problem.weight[0]
    for _ in range(lab.few(7, 3)):
        middle = (low + high) / 2
        best = net_trim(
            problem.weight[0], inputs, middle, bias_column=True, iterations=lab.few(600, 60)
        ).weight
        share = 100 * int((best[:, :-1] != 0).sum()) / problem.prunable
        low, high = (middle, high) if share > kept else (low, middle)
    return best


def _error(who: Subject, matrix: Tensor) -> float:
    layer = find_layers(who.model, "fc2")[0]
    dense = layer.matrix()
    try:
        layer.write(matrix.unsqueeze(0))
        return who.error(who.model)
    finally:
        layer.write(dense)


def memory() -> dict[str, Any]:
    """Return the bytes of Net-Trim's quadratic form and of L-OBS's Ψ with its inverse."""
    samples = [50, 100, 200, 400, 600, 800, 1000]
    return {
        "samples": samples,
        "nettrim_gigabytes": [quadratic_form_bytes(n, 300, 100) / 1e9 for n in samples],
        "nettrim_sparse_gigabytes": [
            quadratic_form_bytes(n, 300, 100, bytes_each=12) / 1e9 for n in samples
        ],
        "lobs_gigabytes": [moment_bytes(301) / 1e9 for _ in samples],
        "paper_gigabytes_at_1000": 65.7,
    }


def _draw(lab: Lab, found: dict[str, Any]) -> None:
    curves = {
        "Net-Trim's Q, 8 bytes an entry": (found["samples"], found["nettrim_gigabytes"]),
        "Net-Trim's Q, with indices (12 bytes)": (
            found["samples"],
            found["nettrim_sparse_gigabytes"],
        ),
        "L-OBS: Ψ and its inverse": (found["samples"], found["lobs_gigabytes"]),
    }
    title = "Memory, second layer of LeNet-300-100"
    pictures.lines(
        lab.picture("memory"), curves, title=title, x="samples", y="gigabytes", yscale="log"
    )
