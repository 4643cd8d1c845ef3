"""`lobs inspect`: what is there to prune, and how sensitive is it?"""

from __future__ import annotations

from typing import Any

from lobs.cli.common import (
    JsonOption,
    SamplesOption,
    SubjectArgument,
    TrustOption,
    notes,
    print_json,
    print_table,
    say,
)

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def inspect(
    network: SubjectArgument,
    samples: SamplesOption = 5_000,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """List the prunable layers with sizes and the quantiles of their weights' sensitivities.

    A sensitivity is the layer error E that deleting one weight would cost, the rest of its row
    re-optimised. Layers that cannot be pruned are named with the reason, and weights of no known
    kind with their size. Example: `lobs inspect lenet5 --samples 1000`
    """
    from lobs.calibration.collect import collect_moments
    from lobs.cli.subject import open_subject
    from lobs.layers import find_layers, refused_layers, uncovered_weights

    subject = open_subject(network, samples, trust=trust)
    refused, uncovered = refused_layers(subject.model), uncovered_weights(subject.model)
    found = find_layers(subject.model, skip=[*refused])
    with notes():
        calibration = collect_moments(subject.model, subject.batches, found, progress=not json)
        rows = [_row(layer, calibration[layer.name]) for layer in found]
    if json:
        print_json(
            {
                "network": network,
                "samples": calibration.samples,
                "layers": rows,
                "refused": refused,
                "not_covered": uncovered,
            }
        )
        return
    columns = [
        "layer",
        "type",
        "shape",
        "weights",
        "zero",
        "inputs seen",
        "damping",
        *(f"q{q:.0%}" for q in QUANTILES),
    ]
    table = [
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
    print_table(
        f"{subject.title}: sensitivity of weights (layer error E of deleting one)", columns, table
    )
    for name, reason in refused.items():
        say(f"refused: layer '{name}': {reason}")
    for name, size in uncovered.items():
        say(f"not covered: {name} ({size:,} weights), of no kind that lobs prunes")


def _row(layer: Any, moments: Any) -> dict[str, Any]:
    import torch

    from lobs.calibration.layer_problem import layer_problem, sensitivities

    values, damping = sensitivities(layer_problem(layer, layer.matrix(), moments))
    # torch.quantile takes at most 2²⁴ values: a regular sample of a large layer is as good.
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
