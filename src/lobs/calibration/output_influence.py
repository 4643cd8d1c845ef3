"""How strongly does each output unit of a layer move the network's outputs?

The answer is the mean squared Jacobian, g_i = mean_x Σ_c (∂out_c/∂z_i)², summed over a unit's
positions. A vector–Jacobian product with a random ±1 probe v has (vᵀJ_i)² as an unbiased estimate
of Σ_c J_ci², so one probe a sample and the mean over samples give g for every unit of every layer
at once, at the cost of one forward and one backward pass whatever the number of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.batches import told
from lobs._system.distributed import process_group
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching
from lobs._system.progress import track
from lobs.calibration.forward import batch_size, call, evaluating, length, main_output


def output_influence(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    *,
    seed: int = 0,
    skipped: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Mean squared Jacobian of the network's outputs by output unit: (groups, rows) for every layer, in float64.

    Where several processes share the data, `skipped` says how many signs the others draw before
    each batch, so that every batch has the signs that it would have in one process.
    """
    total = {
        layer.name: torch.zeros(layer.groups, layer.rows, dtype=torch.float64) for layer in layers
    }
    samples = 0
    generator = torch.Generator().manual_seed(seed)
    with (
        process_group().raise_together(),
        evaluating(model),
        torch.enable_grad(),
        track("influence", length(batches)) as advance,
    ):
        for index, batch in enumerate(batches):
            with _probed(layers) as probes:
                answer = call(model, batch)
            out = main_output(answer)
            if out is None:
                raise CalibrationError(
                    "a network-wide budget needs a network that returns a floating-point tensor, "
                    f"not {type(answer).__name__}. "
                    f"Wrap it, or use scope='layer'."
                )
            samples += batch_size(batch)
            advance(1)
            if index < len(skipped):
                torch.randint(0, 2, (skipped[index],), generator=generator)
            if not out.requires_grad:  # no layer has a say in it
                continue
            signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
            with told(
                "going back through the network, as a budget for all of it needs (scope='layer' "
                "does not),"
            ):
                # The gradient of a scalar: given signs, torch would import sympy to compare shapes.
                gradients = torch.autograd.grad(
                    (out * signs).sum(), [z for _, z in probes], allow_unused=True
                )
            for (layer, _), gradient in zip(probes, gradients, strict=True):
                if gradient is not None:
                    total[layer.name] += layer.by_unit(gradient.to(torch.float64).square()).cpu()
    process_group().all_reduce(*total.values())
    samples = round(process_group().sum_numbers(samples)[0])
    return {name: value / max(samples, 1) for name, value in total.items()}


@contextmanager
def _probed(layers: Sequence[Layer]) -> Iterator[list[tuple[Layer, Tensor]]]:
    """Add a zero to every layer's output and keep it: its gradient is the output's, whether or not weights are frozen."""
    probes: list[tuple[Layer, Tensor]] = []

    def probe(layer: Layer, z: Tensor) -> Tensor:
        zero = torch.zeros_like(z, requires_grad=True)
        probes.append((layer, zero))
        return z + zero

    with watching(layer.on_output(partial(probe, layer)) for layer in layers):
        yield probes
