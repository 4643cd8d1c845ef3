"""Pictures of weights: pixels that the first layer still reads, and filters before and after."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from lobs.calibration.forward import call, evaluating
from lobs.errors import LobsError
from lobs.layers import Handle, Layer, find_layers

if TYPE_CHECKING:
    from lobs.pruning.result import LayerResult
    from lobs.report import Run

LARGEST = 112  # pixels of a side; larger pictures are averaged down
_TILES, _CHANNELS = 192, 12
_REMOVED = -128
_NEARLY_ALL = 0.98  # of the pixels


class _ReachedError(LobsError):
    """Stop a forward pass at the first layer."""


def pixels_read(model: nn.Module, example: Tensor) -> Tensor | None:
    """Return, for every pixel, the share of the first layer's weights on it that are left.

    It is NaN where the layer has no weight on a pixel, and None where the inputs are no pictures.
    Pixels are found by differentiating, so flattening, padding or scaling in between do not matter.
    """
    if not is_picture(example):
        return None
    image = example[:1].detach().clone().requires_grad_()
    with evaluating(model), torch.enable_grad():
        found = _first(model, image)
        if found is None:
            return None
        layer, x = found
        mask = layer.unfolded(layer.weight.detach() != 0).sum(dim=1, keepdim=True).to(x.dtype)
        kept, all_of_it = (
            _reads(layer, x, image, m) for m in (mask, torch.full_like(mask, layer.rows))
        )
    return kept if all_of_it is None or kept is None else kept / all_of_it


def is_picture(example: Any) -> bool:
    """Return whether this is a batch of images: one to four channels, and four pixels or more."""
    if (
        not isinstance(example, Tensor)
        or example.dim() != 4
        or not example.is_floating_point()
        or not len(example)
    ):
        return False
    return example.shape[1] <= 4 and min(example.shape[2:]) >= 4


def _first(model: nn.Module, image: Tensor) -> tuple[Layer, Tensor] | None:
    """Return the layer that runs first, and its input."""
    found: list[tuple[Layer, Tensor]] = []
    handles: list[Handle] = []

    def watch(layer: Layer) -> Handle:
        def stop(x: Tensor) -> None:
            found.append((layer, x))
            raise _ReachedError

        return layer.on_input(stop)

    try:
        for layer in find_layers(model):
            handles.append(watch(layer))  # noqa: PERF401 - if one fails, the earlier hooks are removed
        call(model, image)
    except _ReachedError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found and found[0][1].requires_grad else None


def _reads(layer: Layer, x: Tensor, image: Tensor, counts: Tensor) -> Tensor | None:
    total = torch.stack([(piece * counts).sum() for piece in layer.patches(x)]).sum()
    (gradient,) = torch.autograd.grad(total, image, retain_graph=True, allow_unused=True)
    return None if gradient is None else gradient[0].abs().sum(dim=0)


def pixels(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the mean input and, for every run with a network, the pixels that are still read.

    Return None if there is no picture, or if every run reads nearly all pixels.
    """
    drawn: list[dict[str, Any]] = []
    mean: Tensor | None = None
    for run in runs:
        model, example = pruned_network(run), run.example
        example = example[0] if isinstance(example, tuple | list) and example else example
        if not isinstance(model, nn.Module) or not is_picture(example):
            continue
        share = pixels_read(model, example)
        if share is None:
            continue
        mean = example.detach().float().mean(dim=(0, 1)) if mean is None else mean
        drawn.append(_picture(run, share))
    if mean is None or all(picture["read"] > _NEARLY_ALL * picture["of"] for picture in drawn):
        return None  # a picture in one colour shows nothing
    small = _shrunk(mean)
    span = float(small.max() - small.min()) or 1.0
    return {
        "mean": _bytes(255 * (small - small.min()) / span),
        "size": list(small.shape),
        "runs": drawn,
    }


def _picture(run: Run, share: Tensor) -> dict[str, Any]:
    reachable = ~share.isnan()
    read = int((share > 0).sum())
    of = int(reachable.sum())
    words = f"{read:,} of {of:,} pixels are still read"
    small = _shrunk(share.nan_to_num(0.0))
    # A pixel that is still read must not round to zero.
    levels = torch.where(small > 0, (255 * small).clamp(1, 255), torch.zeros_like(small))
    return {"label": run.label, "read": read, "of": of, "words": words, "share": _bytes(levels)}


def _shrunk(picture: Tensor) -> Tensor:
    factor = math.ceil(max(picture.shape) / LARGEST)
    if factor == 1:
        return picture.float()
    return F.avg_pool2d(picture.float()[None, None], factor, ceil_mode=True)[0, 0]


def gallery(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the filters of every convolution larger than 1×1: dense ones, then each run's."""
    states = [(run.label, weights(pruned_network(run))) for run in runs]
    dense = next((weights(run.dense) for run in runs if run.dense is not None), None)
    sheets = [("dense", dense), *states] if dense is not None else states
    layers = {layer.name: layer for run in runs for layer in run.pruning.layers}
    found = [
        _sheets(layer, [(label, state) for label, state in sheets if state is not None])
        for layer in layers.values()
    ]
    return [sheet for sheet in found if sheet is not None]


def _sheets(
    layer: LayerResult, states: Sequence[tuple[str, Mapping[str, Tensor]]]
) -> dict[str, Any] | None:
    name = next(iter(layer.parameters), "")
    tensors = [
        (label, state[name])
        for label, state in states
        if name in state and state[name].shape == layer.shape
    ]
    if len(layer.shape) != 4 or math.prod(layer.shape[2:]) < 2 or not tensors:
        return None
    channels = min(layer.shape[1], _CHANNELS)
    filters = min(layer.shape[0], max(1, _TILES // channels))
    parts = [(label, t.detach().float().cpu()[:filters, :channels]) for label, t in tensors]
    scale = max(float(t.abs().max()) for _, t in parts) or 1.0
    return {
        "layer": layer.name,
        "filters": filters,
        "channels": channels,
        "kernel": list(layer.shape[2:]),
        "scale": float(f"{scale:.4g}"),
        "note": _shown_part(layer, filters, channels),
        "sheets": [{"label": label, "bits": _signed(t / scale)} for label, t in parts],
    }


def _shown_part(layer: LayerResult, filters: int, channels: int) -> str:
    if (filters, channels) == layer.shape[:2]:
        return f"All {filters} filters of {channels} channel{'s' * (channels > 1)}."
    return (
        f"The first {filters} of {layer.shape[0]} filters, {channels} of {layer.shape[1]} channels."
    )


def pruned_network(run: Run) -> nn.Module | Mapping[str, Tensor] | None:
    """Return the pruned network or its state dict. A `PruningResult` carries it."""
    return run.pruned if run.pruned is not None else getattr(run.pruning, "model", None)


def weights(network: nn.Module | Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """Return a network's tensors by name."""
    return network.state_dict() if isinstance(network, nn.Module) else network


def _signed(values: Tensor) -> str:
    levels = (127 * values).round().clamp(-127, 127)
    return _bytes(torch.where(values == 0, torch.full_like(levels, _REMOVED), levels), torch.int8)


def _bytes(values: Tensor, dtype: torch.dtype = torch.uint8) -> str:
    return base64.b64encode(values.round().to(dtype).contiguous().numpy().tobytes()).decode()
