"""Measure what unusual layers cost beside their forward pass.

    python -m benchmarks.layer_kinds

The layers are a wide depthwise convolution, a transposed convolution and an attention. Each line
gives the forward pass, calibration, and the greedy solver on all layers.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.timing import best_of
from lobs import GreedyOBS, Sparsity, collect_moments
from lobs.calibration.forward import call, evaluating
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers

CASES = {
    "depthwise 3x3, 1,152 groups, 32 images of 14x14": (
        nn.Conv2d(1152, 1152, 3, padding=1, groups=1152),
        torch.randn(32, 1152, 14, 14).relu(),
    ),
    "transposed 4x4, stride 2, 64 to 32 channels, 32 images of 8x8": (
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        torch.randn(32, 64, 8, 8).relu(),
    ),
    "attention of width 256, 32 sequences of 128": (
        nn.TransformerEncoderLayer(256, 8, 512, batch_first=True).eval(),
        torch.randn(32, 128, 256),
    ),
}


def main() -> None:
    torch.manual_seed(0)
    for title, (model, x) in CASES.items():

        def forward(model=model, x=x) -> None:
            with evaluating(model):
                call(model, x)

        layers = find_layers(model)
        calibration = collect_moments(model, [x])
        problems = [
            layer_problem(layer, layer.matrix(), calibration[layer.name]) for layer in layers
        ]
        plain, cost = (
            best_of(3, forward),
            best_of(3, lambda model=model, x=x: collect_moments(model, [x])),
        )
        solved = best_of(
            1,
            lambda problems=problems: [GreedyOBS().path(p).solve(Sparsity(0.5)) for p in problems],
        )
        print(
            f"{title}: forward {plain:.3f} s, calibration {cost:.2f} s, greedy 50 % {solved:.2f} s"
        )


if __name__ == "__main__":
    main()
