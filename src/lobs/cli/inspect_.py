"""`lobs inspect`: what is there to prune, and how sensitive is it?"""

from __future__ import annotations

from typing import Any

from lobs.cli.common import JsonOption, SamplesOption, SubjectArgument, TrustOption, notes, print_json, print_table

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def inspect(
    network: SubjectArgument, samples: SamplesOption = 5_000, trust: TrustOption = False, json: JsonOption = False
) -> None:
    """List the prunable layers with sizes and the quantiles of their weights' sensitivities.

    A sensitivity is the layer error E that deleting one weight would cost, the rest of its row re-optimised. Example:
    `lobs inspect lenet5 --samples 1000`
    """
    from lobs.calibrate import collect
    from lobs.cli.subject import open_subject
    from lobs.layers import find_layers

    subject = open_subject(network, samples, trust=trust)
    found = find_layers(subject.model)
    with notes():
        calibration = collect(subject.model, subject.batches, found, progress=not json)
        rows = [_row(layer, calibration[layer.name]) for layer in found]
    if json:
        print_json({"network": network, "samples": calibration.samples, "layers": rows})
        return
    columns = ["layer", "type", "shape", "weights", "zero", "inputs seen", "damping", *(f"q{q:.0%}" for q in QUANTILES)]
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
    print_table(f"{subject.title}: sensitivity of weights (layer error E of deleting one)", columns, table)


def _row(layer: Any, moments: Any) -> dict[str, Any]:
    import torch

    from lobs.pipeline import layer_problem, sensitivities

    values, damping = sensitivities(layer_problem(layer, layer.matrix(), moments))
    # torch.quantile takes at most 2²⁴ values: a regular sample of a large layer is as good.
    sample = values[:: -(-len(values) // 2**24)]
    quantiles = torch.quantile(sample, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return {
        "name": layer.name,
        "type": type(layer.module).__name__,
        "shape": list(layer.weight.shape),
        "weights": layer.weight.numel(),
        "zeros": int((layer.weight == 0).sum()),
        "inputs": moments.count,
        "damping": damping,
        "sensitivity_quantiles": {str(q): v for q, v in zip(QUANTILES, quantiles, strict=True)},
    }
