"""Write weights and moments of a network's layers as files.

    python -m benchmarks.layer_files package.module:function DIR [--layers layer3.1.conv2 …]

The function returns (model, batches), as for `lobs prune`. `benchmarks.rivals` and
`benchmarks.patterns` read the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from lobs import collect_moments
from lobs.calibration.on_demand import passes
from lobs.cli.subject import open_subject
from lobs.layers import find_layers

_TOGETHER = 4e9  # bytes of moments that are summed in one pass


def read(file: Path) -> tuple[Tensor, Tensor, bool]:
    """Return a layer's weight, its moment, and whether its last column is a bias.

    The moment of a bias column with itself is 1.
    """
    tensors = load_file(str(file))
    return (
        tensors["weight"],
        tensors["moment"],
        bool(abs(float(tensors["moment"][-1, -1]) - 1) < 1e-12),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", nargs="*")
    given = parser.parse_args()
    subject = open_subject(given.network, None, trust=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    chosen = [layer for layer in find_layers(subject.model, given.layers) if layer.groups == 1]
    for group in passes(chosen, _TOGETHER):
        seen = collect_moments(subject.model, subject.batches, group)
        for layer in group:
            tensors = {
                "weight": layer.matrix()[0].contiguous(),
                "moment": seen[layer.name].moment[0].contiguous(),
            }
            save_file(tensors, given.folder / f"{layer.name}.safetensors")
            print(layer.name, tuple(tensors["weight"].shape))


if __name__ == "__main__":
    main()
