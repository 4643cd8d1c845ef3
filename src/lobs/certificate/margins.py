"""Count the inputs whose answer provably cannot have changed.

An input's output has moved by at most the sum of its layers' deviations times the gains behind
them. Where its margin is larger than √2 times that, the top answer is the dense network's.

This needs samples that do not mix. That is tested: some samples become NaN, and NaN must reach
their rows and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.comparison import Comparison
from lobs.calibration.forward import call, evaluating, main_output, plain_input
from lobs.layers import Layer, watching

_SAMPLES = 16  # of the test whether samples mix


def share(comparison: Comparison, gains: Mapping[str, float] | None) -> float | None:
    """Return the share of a comparison's samples that are certified, over all processes.

    Args:
        comparison: what was recorded for every sample.
        gains: factors from each layer's deviation to the output; None where there are none.
    """
    found = None if gains is None else comparison.per_sample.certified(gains)
    certified, samples, failed = process_group().sum_numbers(
        *(found or (0, 0)), found is None and comparison.samples > 0
    )
    return None if failed or not samples else certified / samples


def usable(
    gains: Mapping[str, float], pruned: nn.Module, layers: Iterable[Layer], example: Any
) -> dict[str, float] | None:
    """Return the gains of layers whose samples do not mix; None where some do.

    Args:
        gains: factors from each layer's deviation to the output.
        pruned: the pruned network.
        layers: its layers.
        example: one sample.
    """
    watched = [layer for layer in layers if layer.name in gains]
    if not isinstance(example, Tensor) or not example.is_floating_point():
        return None
    try:
        independent = all(_independent(pruned, example, watched, chosen) for chosen in _patterns())
    except Exception:  # modules of the network may raise anything on another batch size
        return None
    return dict(gains) if independent and len(watched) == len(gains) else None


def _patterns() -> Iterator[Tensor]:
    """Yield choices of samples. For any two samples, one of them has the first alone."""
    numbers = torch.arange(_SAMPLES)
    for bit in range((_SAMPLES - 1).bit_length()):
        chosen = (numbers >> bit) % 2 == 1
        yield from (chosen, ~chosen)


def _independent(
    model: nn.Module, example: Tensor, layers: Sequence[Layer], chosen: Tensor
) -> bool:
    """Return whether NaN in the chosen samples reaches their rows, and no others."""
    x = example[:1].repeat(_SAMPLES, *[1] * (example.dim() - 1))
    x[chosen.to(x.device)] = torch.nan
    seen: list[Tensor | None] = []
    with (
        evaluating(model),
        watching(layer.on_output(partial(_noted, seen)) for layer in layers),
    ):
        seen.append(main_output(call(model, x)))
    return len(seen) == len(layers) + 1 and all(
        z is not None
        and len(z) == _SAMPLES
        and torch.equal(z.isnan().flatten(1).any(dim=1).cpu(), chosen)
        for z in seen
    )


def _noted(seen: list[Tensor | None], z: Tensor) -> None:
    seen.append(z.detach().clone())


def of_shape(batch: Any, example: Any) -> bool:
    """Return whether a batch holds samples of the example's shape: gains depend on it."""
    x = plain_input(batch)
    return (
        isinstance(x, Tensor) and isinstance(example, Tensor) and x.shape[1:] == example.shape[1:]
    )
