"""Fold parametrised weights: weight norm and spectral norm become plain weights, in a copy.

Such a weight is computed anew from other parameters in every pass, so writing it would be undone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from lobs.errors import UnsupportedLayerError, caution
from lobs.layers.discovery import choose_layers, is_parametrised, named, old_hooks
from lobs.layers.untouched import copied


def folded(
    model: nn.Module, layers: str | Iterable[str] | None = None, skip: str | Iterable[str] = ()
) -> nn.Module:
    """Return the network itself, or a copy in which layers have plain weights, with a note.

    Args:
        model: the network.
        layers: names or globs of the layers that are wanted; None for all.
        skip: names or globs of the layers to leave alone.
    """
    if not any(map(is_parametrised, model.modules())):
        return model
    try:
        wanted = {id(layer.module) for layer in choose_layers(model, layers, skip)}
    except UnsupportedLayerError:  # the names are checked where layers are chosen
        return model
    parts = [(path or "model", m) for path, m in model.named_modules() if id(m) in wanted]
    names = [path for path, module in parts if is_parametrised(module)]
    if not names:
        return model
    plain = copied(model)
    modes = [(module, module.training) for module in plain.modules()]
    plain.eval()  # in training mode spectral norm takes another step at every access
    for name in names:
        _fold(plain if name == "model" else plain.get_submodule(name))
    for module, mode in modes:
        module.training = mode
    caution(
        f"weights of {named(names)} are parametrised (weight_norm, spectral_norm): they were "
        "folded. The pruned network has plain weights."
    )
    return plain


def _fold(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        # A copy shares its class with the network, and removing changes the class.
        own = type(module)
        module.__class__ = type(own.__name__, own.__bases__, dict(vars(own)))
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    for hook in old_hooks(module):
        remove = utils.remove_weight_norm if isinstance(hook, WeightNorm) else None
        (remove or utils.remove_spectral_norm)(module, hook.name)
