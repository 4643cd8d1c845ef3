"""Fold parametrised weights: weight norm and spectral norm become plain weights, in a copy.

Such a weight is computed anew from other parameters in every pass, so writing it would be undone.
"""

from __future__ import annotations

from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lobs.errors import caution
from lobs.layers.discovery import as_layer, named
from lobs.layers.untouched import copied


def folded(model: nn.Module) -> nn.Module:
    """Return the network itself, or a copy in which layers have plain weights, with a note."""
    names = [path or "model" for path, module in model.named_modules() if _parametrised(module)]
    if not names:
        return model
    plain = copied(model)
    modes = [(module, module.training) for module in plain.modules()]
    plain.eval()  # in training mode spectral norm takes another step at every access
    for module in list(plain.modules()):
        _fold(module)
    for module, mode in modes:
        module.training = mode
    caution(
        f"weights of {named(names)} are parametrised (weight_norm, spectral_norm): they were "
        "folded. The pruned network has plain weights."
    )
    return plain


def _parametrised(module: nn.Module) -> bool:
    """Return whether a module of a known kind computes its weight anew in every pass."""
    known = as_layer("", module) is not None or isinstance(module, nn.MultiheadAttention)
    return known and (parametrize.is_parametrized(module) or bool(_old_hooks(module)))


def _old_hooks(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """Return the hooks by which older versions of torch compute weights."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]


def _fold(module: nn.Module) -> None:
    if not _parametrised(module):
        return
    if parametrize.is_parametrized(module):
        # A copy shares its class with the network, and removing changes the class.
        own = type(module)
        module.__class__ = type(own.__name__, own.__bases__, dict(vars(own)))
        for name in list(module.parametrizations):  # type: ignore[union-attr,arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    for hook in _old_hooks(module):
        remove = utils.remove_weight_norm if isinstance(hook, WeightNorm) else None
        (remove or utils.remove_spectral_norm)(module, hook.name)
