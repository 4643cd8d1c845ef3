"""Error against training iterations at the smallest fractions of Table 1, drawn from its result files."""

from __future__ import annotations

from typing import Any

from experiments.dong2017 import pictures
from experiments.dong2017.lab import Lab

# By network: what the paper reaches above its dense error, in how many iterations; DNS's
# iterations; rows by their title.
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
    """(iteration, error) pairs over all stages of a row, with iterations counted from the first."""
    points: list[tuple[int, float]] = []
    start = 0
    for stage in found.get("stages", [found]):
        points += [(start + int(point[0]), float(point[1])) for point in stage["history"]]
        start += stage["iterations"]
    return points


def needed(found: dict[str, Any], wanted: float) -> int | None:
    """The first iteration of a row's last stage at which its error is no more than wanted; None where it never is."""
    last = found.get("stages", [found])[-1]
    start = found["iterations"] - last["iterations"]
    return next((start + int(point[0]) for point in last["history"] if point[1] <= wanted), None)


def draw(lab: Lab, network: str) -> None:
    """One picture a network that has such rows."""
    found = {
        t: r
        for t, row in ROWS.get(network, {}).items()
        if (r := lab.found(f"table1/{network}/{row}")) is not None
    }
    curves = {title: tuple(zip(*history(row), strict=True)) for title, row in found.items()}
    # Rows that run for longer are told of in words; here they would hide what the others do.
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
