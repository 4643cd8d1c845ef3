"""Estimate the diagonal of the loss's curvature, by which optimal brain damage chooses weights.

Optimal brain damage is by LeCun, Denker and Solla (1990). For a softmax classifier the Gauss–Newton
matrix of the cross entropy is the Fisher matrix. It is the mean of g gᵀ, with g the gradient of
one sample's loss. The mean is over inputs and over labels drawn from the network's distribution.

Its diagonal is the mean of g². One backward pass per batch with drawn labels estimates it without
bias, and no true labels are needed. A sample's gradient is summed over the positions of a
convolution before it is squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs._system.distributed import process_group
from lobs._system.progress import track
from lobs.calibration.forward import batch_size, call, evaluating, length
from lobs.errors import CalibrationError
from lobs.layers import Layer, watching
from lobs.layers.hooks import Removable, after_forward

_PIECE_ELEMENTS = 2**24  # of per-sample gradients held at a time


def fisher_diagonal(
    model: nn.Module, batches: Iterable[Any], layers: Sequence[Layer], *, seed: int = 0
) -> dict[str, Tensor]:
    """Return the mean squared gradient of every weight by layer name, in float64.

    Each value has shape (groups, rows, columns [+ 1 for the bias]). The cost is a forward and a
    backward pass over the data, and as much again to square sample by sample.

    Args:
        model: a classifier that returns (samples, classes).
        batches: calibration batches; labels are not used.
        layers: the layers whose weights are wanted.
        seed: seed of the drawn labels.
    """
    for layer in layers:
        _check(layer)
    total = {
        layer.name: torch.zeros_like(layer.matrix(), dtype=torch.float64, device="cpu")
        for layer in layers
    }
    samples, generator = 0, torch.Generator().manual_seed(seed)
    with (
        process_group().raise_together(),
        evaluating(model),
        torch.enable_grad(),
        track("curvature", length(batches)) as advance,
    ):
        for batch in batches:
            with _recorded(layers) as seen:
                out = call(model, batch)
            drawn = _drawn_labels(out, generator)
            # The sum, not the mean: a sample's gradient is then that of its own loss.
            loss = F.cross_entropy(out, drawn, reduction="sum")
            gradients = torch.autograd.grad(loss, [zero for _, _, zero in seen], allow_unused=True)
            for (layer, x, _), gradient in zip(seen, gradients, strict=True):
                if gradient is not None:
                    total[layer.name] += _squares(layer, x, gradient)
            samples += batch_size(batch)
            advance(1)
    process_group().all_reduce(*total.values())
    samples = round(process_group().sum_numbers(samples)[0])
    return {name: value / max(samples, 1) for name, value in total.items()}


def _drawn_labels(out: Any, generator: torch.Generator) -> Tensor:
    """Draw one label per sample from a classifier's own distribution."""
    if not isinstance(out, Tensor) or out.dim() != 2:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise CalibrationError(
            "the curvature of a loss needs a classifier that returns (samples, classes), not "
            f"{got}. Use solver 'obd'."
        )
    chances = out.detach().softmax(dim=1).cpu()
    if not bool(torch.isfinite(chances).all()):
        raise CalibrationError(
            "the curvature of a loss needs finite outputs, and the network gives NaN or infinite "
            "ones. Check its weights and the data, or use solver 'obd'."
        )
    return torch.multinomial(chances, 1, generator=generator).squeeze(1).to(out.device)


def _check(layer: Layer) -> None:
    """Refuse a layer whose gradient per sample is not computed here."""
    if layer.tied or not isinstance(layer.module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        shared = ", shared by several modules," if layer.tied else ""
        raise CalibrationError(
            f"layer '{layer.name}' ({layer.kind}){shared} has no gradient by sample here. Use "
            "solver 'obd', or skip the layer."
        )


def _squares(layer: Layer, x: Tensor, gradient: Tensor) -> Tensor:
    """Sum the squared gradients of the samples' losses over the samples."""
    n, width = len(x), layer.columns + (layer.bias is not None)
    step = max(1, _PIECE_ELEMENTS // max(1, layer.groups * layer.rows * width))
    found = torch.zeros(layer.groups, layer.rows, width, dtype=torch.float64)
    for start in range(0, n, step):
        part, slope = x[start : start + step], gradient[start : start + step]
        # (groups, samples · positions, columns), sample by sample in order
        y = torch.cat(list(layer.patches(part)), dim=1)
        if layer.bias is not None:
            y = torch.cat([y, torch.ones_like(y[..., :1])], dim=-1)
        y = y.unflatten(1, (len(part), -1))  # type: ignore[no-untyped-call]
        z = _by_position(layer, slope)  # (groups, samples, positions, rows)
        found += torch.einsum("gspr,gspc->gsrc", z, y).to(torch.float64).square().sum(dim=1).cpu()
    return found


def _by_position(layer: Layer, slope: Tensor) -> Tensor:
    """Reshape a gradient of the layer's output to (groups, samples, positions, rows)."""
    if isinstance(layer.module, nn.Linear):
        return slope.reshape(1, len(slope), -1, layer.rows)
    flat: Tensor = slope.flatten(2).unflatten(1, (layer.groups, layer.rows))  # type: ignore[no-untyped-call]
    return flat.permute(1, 0, 3, 2)


@contextmanager
def _recorded(layers: Sequence[Layer]) -> Iterator[list[tuple[Layer, Tensor, Tensor]]]:
    """Record every layer's input, and add a zero to its output.

    The gradient of the zero is the gradient of the output.
    """
    seen: list[tuple[Layer, Tensor, Tensor]] = []

    def record(layer: Layer) -> Removable:
        def hook(_: nn.Module, args: tuple[Any, ...], z: Tensor) -> Tensor:
            zero = torch.zeros_like(z, requires_grad=True)
            seen.append((layer, args[0].detach(), zero))
            return z + zero

        return after_forward(layer.module, hook)

    with watching(record(layer) for layer in layers):
        yield seen
