"""Convert masks to `torch.nn.utils.prune` and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lobs.errors import MaskError


def to_torch_prune(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """Register masks with `torch.nn.utils.prune`, in place, for its tools and training loops."""
    for name, mask in masks.items():
        owner, _, key = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            raise MaskError(f"mask '{name}' names no parameter of the network.") from None
        tensor = getattr(module, key, None)
        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape or mask.dtype != torch.bool:
            raise MaskError(
                f"mask '{name}' is {mask.dtype} {tuple(mask.shape)} and fits no parameter of that "
                "name."
            )
        prune.custom_from_mask(module, key, mask.to(tensor.device))  # type: ignore[no-untyped-call]
    return model


def from_torch_prune(model: nn.Module, *, permanent: bool = True) -> dict[str, Tensor]:
    """Return the masks of everything that `torch.nn.utils.prune` pruned, by parameter name.

    With `permanent`, `prune.remove` then makes the zeros part of ordinary parameters, in place.
    """
    found = {}
    for name, module in model.named_modules():
        keys = [key.removesuffix("_mask") for key in module._buffers if key.endswith("_mask")]
        for key in keys:
            if f"{key}_orig" not in module._parameters:
                continue
            mask = module._buffers[f"{key}_mask"]
            assert mask is not None
            found[f"{name}.{key}" if name else key] = mask.detach().bool().clone()
            if permanent:
                prune.remove(module, key)  # type: ignore[no-untyped-call]
    if not found:
        raise MaskError(
            "torch.nn.utils.prune has pruned nothing here. It keeps no masks after prune.remove: "
            "read them before."
        )
    return found
