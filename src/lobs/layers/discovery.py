"""Discover a network's layers, choose among them, and say why others cannot be pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lobs.errors import UnsupportedLayerError
from lobs.layers.attention import attention_layers
from lobs.layers.attention_forward import ObservedAttention
from lobs.layers.base import Layer
from lobs.layers.convolution import Conv1dLayer, Conv2dLayer, Conv3dLayer
from lobs.layers.functional import (
    FunctionalConvolutionLayer,
    FunctionalLinearLayer,
    Use,
    functional_layer,
)
from lobs.layers.linear import FlippedLinearLayer, LinearLayer, flipped_linear_class
from lobs.layers.recurrent import recurrent_layers
from lobs.layers.recurrent_forward import RECURRENT, ObservedRecurrence
from lobs.layers.transposed import ConvTranspose1dLayer, ConvTranspose2dLayer, ConvTranspose3dLayer
from lobs.layers.uses import Learnt, learnt

# Module class → its view as a layer. A new kind of layer is one more entry.
VIEWS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: Conv1dLayer,
    nn.Conv2d: Conv2dLayer,
    nn.Conv3d: Conv3dLayer,
    nn.ConvTranspose1d: ConvTranspose1dLayer,
    nn.ConvTranspose2d: ConvTranspose2dLayer,
    nn.ConvTranspose3d: ConvTranspose3dLayer,
}
KINDS = (
    "Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, MultiheadAttention, LSTM, GRU, RNN and their "
    "cells, and transformers' Conv1D"
)
# Modules that hold several layers.
SEVERAL = (nn.MultiheadAttention, *RECURRENT)


def as_layer(name: str, module: nn.Module) -> Layer | None:
    """Return a module as a layer; None where it is no layer, or several.

    An empty name stands for the whole network.
    """
    root, name = name == "", name or "model"
    for plain, view in VIEWS.items():
        if isinstance(module, plain):
            return view(name, module, root)
    return FlippedLinearLayer(name, module, root) if flipped_linear_class(module) else None


def all_layers(model: nn.Module) -> list[Layer]:
    """Return every layer of a known kind, prunable or not, in the order of the module tree.

    Modules that share a weight are one layer.
    """
    found: dict[Hashable, Layer] = {}
    inside_attention = {
        id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)
    }
    for name, module in model.named_modules():
        views: Sequence[Layer] = []
        if isinstance(module, nn.MultiheadAttention):
            views = attention_layers(name, module)
        elif isinstance(module, RECURRENT):
            views = recurrent_layers(name, module)
        elif id(module) not in inside_attention and (alone := as_layer(name, module)):
            views = [alone]
        for view in views:
            key = (view.form, view.weight_part.place(module))
            first = found.get(key)
            found[key] = view if first is None else replace(first, tied=(*first.tied, view))
    known = learnt(model)
    return list(found.values()) if known is None else _with_uses(model, known, [*found.values()])


def _with_uses(model: nn.Module, known: Learnt, plain: list[Layer]) -> list[Layer]:
    """Return all layers in order: those of modules, and weights that are used through functions.

    A function's use takes the place of the module that owns the weight.
    """
    order = {path: number for number, (path, _) in enumerate(model.named_modules())}
    uses = [use for use in known.uses if _is_function(model, use, known)]
    keys = {use.weight.key for use in uses}
    parts = Counter(use.weight.key for use in uses)
    found = [
        (order["" if layer.root else _path(layer)], layer)
        for layer in plain
        if f"{layer.prefix}{layer.weight_part.key}" not in keys
    ]
    for use in uses:
        owner, _, key = use.weight.key.rpartition(".")
        name = owner if key == "weight" and owner else use.weight.key
        name = f"{name}.{use.weight.start}" if parts[use.weight.key] > 1 else name
        found.append((order[owner], functional_layer(model, use, name)))
    return [layer for _, layer in sorted(found, key=lambda item: item[0])]


def _path(layer: Layer) -> str:
    return layer.prefix.removesuffix(".")


def _is_function(model: nn.Module, use: Use, known: Learnt) -> bool:
    """Return whether a weight is used in no other way, and not by a module that lobs knows."""
    owner = model.get_submodule(use.weight.key.rpartition(".")[0])
    itself = owner is model.get_submodule(use.site)
    several = isinstance(owner, SEVERAL)
    return not (several or use.weight.key in known.others or (itself and is_plain_layer(owner)))


def open_questions(model: nn.Module) -> bool:
    """Return whether only running the network tells how it uses some of its weights."""
    owners = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for key, _ in module.named_parameters(recurse=False)
    }
    own = any(not _has_known_forward(layer.module) for layer in all_layers(model))
    return own or bool(uncovered_weights(model).keys() - owners)


def find_layers(
    model: nn.Module, layers: str | Iterable[str] | None = None, skip: str | Iterable[str] = ()
) -> list[Layer]:
    """Return the prunable layers in the order of the module tree.

    Modules that share a weight are one layer, with the name of the first. Any of their names
    chooses it. By default, layers that cannot be pruned are left out.

    Args:
        model: any network.
        layers: names or globs of the wanted layers; all that can be pruned by default.
        skip: names or globs of layers to leave out.

    Raises:
        UnsupportedLayerError: no layer is left, or a layer that `layers` names cannot be pruned.
    """
    chosen = choose_layers(model, layers, skip)
    refused = _refused(model, chosen)
    if refused and (layers is not None or len(refused) == len(chosen)):
        raise refusal(refused)
    return [layer for layer in chosen if layer.name not in refused]


def refusal(reasons: Mapping[str, str]) -> UnsupportedLayerError:
    """Return one error for all layers that cannot be pruned, with the line that goes on.

    Args:
        reasons: why each cannot be pruned, and the remedy, by layer name.
    """
    if len(reasons) == 1:
        ((name, reason),) = reasons.items()
        return UnsupportedLayerError(f"layer '{name}': {reason}, or skip the layer.")
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    parts = [f"{named(names)}: {reason}" for reason, names in by_reason.items()]
    return UnsupportedLayerError(
        f"{len(reasons)} layers cannot be pruned. {'; '.join(parts)}, or skip them all: "
        f"skip={[*reasons]}."
    )


def named(names: Sequence[str], most: int = 3) -> str:
    """Return the first names in quotes, and how many more there are.

    >>> named(["a", "b", "c", "d"], 2)
    "'a', 'b' and 2 more"
    """
    first = ", ".join(f"'{name}'" for name in names[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def choose_layers(
    model: nn.Module, layers: str | Iterable[str] | None = None, skip: str | Iterable[str] = ()
) -> list[Layer]:
    """Return what `find_layers` chooses, also where a layer's weights are on the meta device.

    Args:
        model: any network.
        layers: names or globs of the wanted layers; all by default.
        skip: names or globs of layers to leave out.
    """
    found = all_layers(model)
    names = [name for layer in found for name in layer.names]
    wanted, unwanted = _matching(names, layers, "layers"), _matching(names, skip, "skip") or set()
    chosen = [
        x for x in found if (wanted is None or wanted & {*x.names}) and not unwanted & {*x.names}
    ]
    if not chosen and isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedLayerError(
            "the network is scripted, which hides its layers: prune it before torch.jit.script."
        )
    if not chosen:
        raise UnsupportedLayerError(
            f"there is no layer to prune: lobs prunes {KINDS}, less what `skip` names."
        )
    for name, parameter in model.named_parameters():
        # Running the network creates these, also in a layer that is not chosen.
        if isinstance(parameter, UninitializedParameter):
            raise UnsupportedLayerError(
                f"layer '{name.rpartition('.')[0]}': its {name.rpartition('.')[2]} has no shape "
                "yet; run one batch first."
            )
    return chosen


def refused_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers of a known kind that cannot be pruned, with the reason."""
    return _refused(model, all_layers(model))


def uncovered_weights(model: nn.Module) -> dict[str, int]:
    """Return the sizes of weights outside all known kinds of layers, such as embeddings."""
    known = {id(layer.weight_part.parameter(layer.module)) for layer in all_layers(model)}
    rest = [
        (n, p)
        for n, p in model.named_parameters()
        if id(p) not in known and not isinstance(p, UninitializedParameter)
    ]
    return {name: p.numel() for name, p in rest if p.dim() > 1}


def _matching(
    names: Sequence[str], patterns: str | Iterable[str] | None, what: str
) -> set[str] | None:
    if patterns is None:
        return None
    matched: set[str] = set()
    if not isinstance(patterns, str | Iterable):
        raise UnsupportedLayerError(
            f"{what} is {patterns!r}: give names or globs, such as '{patterns}'."
        )
    for pattern in map(str, [patterns] if isinstance(patterns, str) else patterns):
        hits = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not hits:
            raise UnsupportedLayerError(
                f"{what} names '{pattern}', which matches no prunable layer. There are: "
                f"{', '.join(names)}."
            )
        matched |= hits
    return matched


def _refused(model: nn.Module, layers: Sequence[Layer]) -> dict[str, str]:
    owners: dict[int, list[tuple[str, int]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, UninitializedParameter):
                owners.setdefault(_memory(parameter), []).append(
                    (f"{name}.{key}" if name else key, id(parameter))
                )
    reasons = {layer.name: _unsupported(layer) or _shared(layer, owners) for layer in layers}
    known = learnt(model)
    for layer in layers:  # now that it is known, say what the module does instead
        reader = known and known.others.get(f"{layer.prefix}{layer.weight_part.key}")
        if reader and not _has_known_forward(layer.module):
            reasons[layer.name] = (
                f"{type(layer.module).__name__} computes another weight from it before it is used "
                f"({reader}); use a plain one"
            )
    return {name: reason for name, reason in reasons.items() if reason}


def _memory(tensor: Tensor) -> int:
    """Return a key for a tensor's memory; empty and meta tensors have none but their id."""
    return tensor.data_ptr() or id(tensor)


def _shared(layer: Layer, owners: dict[int, list[tuple[str, int]]]) -> str:
    """Return why a layer's parameters are not its own; empty where only tied layers use them."""
    views = (layer, *layer.tied)
    for what, parts in (
        ("weight", [v.weight_part for v in views]),
        ("bias", [v.bias_part for v in views]),
    ):
        parameter = parts[0].parameter(layer.module)
        if parameter is None or (what == "bias" and layer.bias is None):
            continue
        ours = {
            (f"{view.prefix}{part.key}", id(parameter))
            for view, part in zip(views, parts, strict=True)
        }
        users = owners[_memory(parameter)]
        if not {*users} <= ours:
            return (
                f"its {what} is shared by {', '.join(name for name, _ in users)}; pruning it for "
                "one would change the others. Untie them"
            )
    return ""


def _unsupported(layer: Layer) -> str:
    """Return why a layer cannot be pruned as it is, and the remedy; empty if it can."""
    for view in (layer, *layer.tied):
        module = view.module
        if isinstance(view, FunctionalLinearLayer | FunctionalConvolutionLayer):
            return "its weight is on the meta device; load weights first" * view.weight.is_meta
        inner = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
        if any(parametrize.is_parametrized(m) for m in inner):
            return (
                "its weight is parametrised (weight_norm and the like), so writing it would be "
                "undone; remove that first"
            )
        weight, bias = (part.parameter(module) for part in (view.weight_part, view.bias_part))
        if isinstance(weight, UninitializedParameter):
            return "its weight has no shape yet; run one batch first"
        if not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter | NoneType):
            return (
                "its weight or bias is not a parameter (torch.nn.utils.prune, perhaps); make it "
                "permanent first (prune.remove)"
            )
        if weight.device.type == "meta":
            return "its weight is on the meta device; load weights first"
        if weight.is_complex():
            return "its weight is complex; use real layers for its real and imaginary parts"
        if not weight.numel():
            return "it has no weights; remove it"
        if not _has_known_forward(module) or _overridden(module):
            return (
                f"{type(module).__name__} computes its output in its own way, not as "
                f"{_known_class(module).__name__} does; use a plain one"
            )
    return ""


def _overridden(module: nn.Module) -> bool:
    """Return whether the `forward` of a module of several layers was replaced by other code."""
    forward = module.__dict__.get("forward")
    return isinstance(module, SEVERAL) and not isinstance(
        forward, ObservedAttention | ObservedRecurrence | NoneType
    )


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is one layer that computes as the class that `lobs` knows."""
    known = as_layer("", module) is not None and _has_known_forward(module)
    return known and "forward" not in vars(module)


def _has_known_forward(module: nn.Module) -> bool:
    """Return whether a module's class computes as the class that `lobs` knows."""
    known = _known_class(module)
    return all(
        getattr(type(module), name, None) is getattr(known, name, None)
        for name in ("forward", "_conv_forward")
    )


def _known_class(module: nn.Module) -> type:
    """Return the class whose forward pass `lobs` knows and a module inherits."""
    known = (*VIEWS, *SEVERAL)
    return (
        next((c for c in known if isinstance(module, c)), None)
        or flipped_linear_class(module)
        or type(module)
    )


def is_parametrised(module: nn.Module) -> bool:
    """Return whether a module of a known kind computes its weight anew in every pass."""
    known = as_layer("", module) is not None or isinstance(module, SEVERAL)
    return known and (parametrize.is_parametrized(module) or bool(old_hooks(module)))


def old_hooks(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """Return the hooks by which older versions of torch compute weights."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]
