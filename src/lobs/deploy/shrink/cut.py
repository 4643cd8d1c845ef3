"""Remove channels from modules, and resize a fresh network to a shrunk one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lobs.errors import FileError


def keep_units(module: nn.Linear | nn.Conv2d, units: Tensor) -> None:
    """Keep only these output units."""
    _set(module, "weight", module.weight.detach()[units])
    if module.bias is not None:
        _set(module, "bias", module.bias.detach()[units])
    _describe(module)


def keep_inputs(
    module: nn.Linear | nn.Conv2d, channels: Tensor, features: int, constant: Tensor
) -> None:
    """Keep only these input channels; the others are constant and move into the bias.

    Args:
        module: the layer that reads the channels; changed in place.
        channels: numbers of the channels to keep.
        features: columns per channel.
        constant: value of every channel; NaN where it is not constant.
    """
    columns = (channels.unsqueeze(1) * features + torch.arange(features)).flatten()
    weight = module.weight.detach()
    gone = torch.ones(weight.shape[1], dtype=torch.bool)
    gone[columns] = False
    # A removed channel that is not constant has no weight here, so any value serves.
    values = constant.nan_to_num(0.0).repeat_interleave(features)
    lost = weight.double().flatten(2).sum(dim=2) if weight.dim() > 2 else weight.double()
    shift = lost[:, gone] @ values[gone]
    if bool((shift != 0).any()):
        old = (
            torch.zeros(len(weight), dtype=weight.dtype)
            if module.bias is None
            else module.bias.detach()
        )
        _set(module, "bias", (old.double() + shift).to(weight.dtype))
    _set(module, "weight", weight[:, columns])
    _describe(module)


def keep_normed(norm: nn.BatchNorm1d | nn.BatchNorm2d, channels: Tensor) -> None:
    """Keep only these channels of a batch norm, counted in features."""
    features = norm.num_features
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, name)
        if tensor is not None and len(tensor) == features:
            _set(norm, name, tensor.detach()[channels])
    norm.num_features = len(channels)


def fit_to(
    model: nn.Module, state: Mapping[str, Tensor], attributes: Mapping[str, int] | None = None
) -> nn.Module:
    """Resize a freshly built network to a shrunk one's state dict, load it, and return it.

    A file written by `lobs shrink` holds weights only. Its network is the original's code with
    smaller modules.

    Args:
        model: the network as its code builds it.
        state: the shrunk network's state dict.
        attributes: numbers that shrinking changed in modules, as the report gives them.
    """
    for name, new in state.items():
        path, _, own = name.rpartition(".")
        module = _submodule(model, path)
        old = None if module is None else getattr(module, own, None)
        # Shrinking adds a bias to a layer without one, where a constant moves into it.
        fits = isinstance(old, Tensor) and old.shape == new.shape
        if module is not None and not fits and (isinstance(old, Tensor) or own == "bias"):
            _set(module, own, torch.empty_like(new))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not attributes:
            _describe(module)
        norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        if norm and isinstance(module.running_mean, Tensor):
            module.num_features = module.running_mean.numel()  # type: ignore[assignment]
    for name, value in (attributes or {}).items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, value)
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise FileError(
            f"the shrunk weights do not fit {type(model).__name__}: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return model


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = value.clone()
    else:
        setattr(module, name, nn.Parameter(value.clone(), requires_grad=value.is_floating_point()))


def _describe(module: nn.Linear | nn.Conv2d) -> None:
    """Set a module's size attributes to those of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    else:
        module.out_channels, module.in_channels = (
            len(module.weight),
            module.weight.shape[1] * module.groups,
        )
