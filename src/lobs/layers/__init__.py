"""View a network's modules as matrix problems, and write solutions back.

There is one file per kind of layer. `discovery` chooses the layers of a network, `hooks` observes
them, `graph` traces the network, and `operations` lists the steps between layers.
"""

from __future__ import annotations

from lobs.layers.attention import AttentionLayer
from lobs.layers.base import Layer
from lobs.layers.convolution import (
    Conv1dLayer,
    Conv2dLayer,
    Conv3dLayer,
    ConvolutionLayer,
    WindowedLayer,
)
from lobs.layers.discovery import (
    all_layers,
    as_layer,
    find_layers,
    refused_layers,
    uncovered_weights,
)
from lobs.layers.hooks import Handle, watching
from lobs.layers.linear import FlippedLinearLayer, LinearLayer
from lobs.layers.transposed import (
    ConvTranspose1dLayer,
    ConvTranspose2dLayer,
    ConvTranspose3dLayer,
    TransposedConvolutionLayer,
)

__all__ = [
    "AttentionLayer",
    "Conv1dLayer",
    "Conv2dLayer",
    "Conv3dLayer",
    "ConvTranspose1dLayer",
    "ConvTranspose2dLayer",
    "ConvTranspose3dLayer",
    "ConvolutionLayer",
    "FlippedLinearLayer",
    "Handle",
    "Layer",
    "LinearLayer",
    "TransposedConvolutionLayer",
    "WindowedLayer",
    "all_layers",
    "as_layer",
    "find_layers",
    "refused_layers",
    "uncovered_weights",
    "watching",
]
