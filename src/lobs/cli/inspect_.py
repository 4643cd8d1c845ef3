"""`lobs inspect`: list the prunable layers and how sensitive they are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lobs.cli.options import DATA, CodeOption, JsonOption, SubjectArgument, TrustOption
from lobs.cli.output import Column, print_json, print_table, say, working

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SHOWN_LAST = (0.25, 0.75)  # left out first where the terminal is narrow


def inspect(
    network: SubjectArgument,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Calibration samples.", metavar="N", rich_help_panel=DATA),
    ] = 5_000,
    code: CodeOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """List the prunable layers with sizes and quantiles of their weights' sensitivities.

    A sensitivity is the layer error E of deleting one weight and refitting the rest of its row.
    Layers that cannot be pruned are named with the reason.

    Example:
      lobs inspect lenet5 --samples 1000
    """
    from lobs.calibration.collect import collect_moments
    from lobs.cli.subject import open_subject
    from lobs.layers import find_layers, refused_layers, uncovered_weights

    subject = open_subject(network, samples, trust=trust, network=code)
    refused, uncovered = refused_layers(subject.model), uncovered_weights(subject.model)
    found = find_layers(subject.model, skip=[*refused])
    with working(json):
        calibration = collect_moments(subject.model, subject.batches, found, progress=not json)
        rows = [_row(layer, calibration[layer.name]) for layer in found]
    if json:
        facts = {"network": network, "samples": calibration.samples, "layers": rows}
        print_json({**facts, "refused": refused, "not_covered": uncovered})
        return
    print_table(
        f"{subject.title}: quantiles of the error E of deleting one weight",
        _columns(),
        _cells(rows),
    )
    for name, reason in refused.items():
        say(f"refused: layer '{name}': {reason}")
    for name, size in uncovered.items():
        say(f"not covered: {name} ({size:,} weights), of no kind that lobs prunes")


def _columns() -> list[Column]:
    quantiles = [Column(f"{q:.0%}", 4 if q in _SHOWN_LAST else 1) for q in QUANTILES]
    return [
        Column("layer"),
        Column("type", 5),
        Column("shape", 1),
        Column("weights"),
        Column("zeros", 3),
        Column("inputs seen", 6),
        Column("damping", 7),
        *quantiles,
    ]


def _cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["name"],
            row["type"],
            "×".join(map(str, row["shape"])),
            f"{row['weights']:,}",
            f"{row['zeros']:,}",
            f"{row['inputs']:,}",
            f"{row['damping']:.1e}",
            *(f"{v:.1e}" for v in row["sensitivity_quantiles"].values()),
        ]
        for row in rows
    ]


def _row(layer: Any, moments: Any) -> dict[str, Any]:
    import torch

    from lobs.calibration.layer_problem import layer_problem, sensitivities

    values, damping = sensitivities(layer_problem(layer, layer.matrix(), moments))
    # torch.quantile takes at most 2²⁴ values: a large layer is sampled regularly.
    sample = values[:: -(-len(values) // 2**24)]
    quantiles = torch.quantile(sample, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return {
        "name": layer.name,
        "type": layer.kind,
        "shape": list(layer.weight.shape),
        "weights": layer.weight.numel(),
        "zeros": int((layer.weight == 0).sum()),
        "inputs": moments.count,
        "damping": damping,
        "sensitivity_quantiles": {str(q): v for q, v in zip(QUANTILES, quantiles, strict=True)},
    }
