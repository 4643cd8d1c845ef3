"""Draw error against training iterations at the smallest fractions of Table 1."""

from __future__ import annotations

from typing import Any

from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab

# By network: the paper's distance to its dense error, its iterations, and those of DNS.
CLAIMS = {"lenet300": (0.20, 643, 34_000), "lenet5": (0.39, 841, 47_000)}
ROWS = {
    "lenet300": {
        "L-OBS, two stages": "lobs-iterative",
        "ours, one stage": "ours-1.5",
        "ours, stages": "ours-staged-1.5",
        "ours, stages, long": "ours-long-1.5",
        "DNS": "dns",
    },
    "lenet5": {
        "L-OBS, two stages": "lobs-iterative",
        "ours, one stage": "ours-0.9",
        "ours, stages": "ours-staged-0.9",
        "DNS": "dns",
    },
}

_LAST = 1000


def history(found: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (iteration, error) pairs over all stages of a row.

    Iterations are counted from the first stage.
    """
    points: list[tuple[int, float]] = []
    start = 0
    for stage in found.get("stages", [found]):
        points += [(start + int(point[0]), float(point[1])) for point in stage["history"]]
        start += stage["iterations"]
    return points


def needed(found: dict[str, Any], wanted: float) -> int | None:
    """Return the first iteration of a row's last stage with an error of at most `wanted`.

    None means that the error is never so small.
    """
    last = found.get("stages", [found])[-1]
    start = found["iterations"] - last["iterations"]
    return next((start + int(point[0]) for point in last["history"] if point[1] <= wanted), None)


def draw(lab: Lab, network: str) -> None:
    """Draw one network's picture from its result files."""
    found = {
        t: r
        for t, row in ROWS.get(network, {}).items()
        if (r := lab.found(f"table1/{network}/{row}")) is not None
    }
    curves = {title: tuple(zip(*history(row), strict=True)) for title, row in found.items()}
    # Longer rows would hide the others; the page describes them in words.
    curves = {title: curve for title, curve in curves.items() if curve[0][-1] <= _LAST}
    if curves:
        extra, _, _ = CLAIMS[network]
        dense = next(iter(found.values()))["original"]
        levels = {
            f"dense {dense:.2f}": dense,
            f"the paper's fall: dense + {extra:.2f}": dense + extra,
        }
        title = f"{'LeNet-300-100 to 1.5' if network == 'lenet300' else 'LeNet-5 to 0.9'} % kept: error against iterations"
        pictures.lines(
            lab.picture(f"iterations-{network}"), curves, title=title, x="iterations", y="test error (%)", levels=levels, yscale="log",
            xlim=(-20, _LAST),
        )  # fmt: skip
