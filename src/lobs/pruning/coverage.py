"""Say which of a network's weights a run may prune, and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lobs.errors import caution
from lobs.layers import Layer, all_layers, refused_layers
from lobs.layers.discovery import choose_layers, named

SKIPPED, EMBEDDING = "skipped", "an embedding"
UNKNOWN = "not the weight of a layer that lobs knows"
_EXPECTED = (SKIPPED, EMBEDDING)  # reasons that need no warning


@dataclass(frozen=True)
class Coverage:
    """How much of a network could be pruned.

    Args:
        weights: number of all the network's parameters.
        prunable: number of weights in the layers that could be pruned.
        left: names of layers and matrices that stayed dense, by reason. Vectors, such as biases
            and the gains of norms, are not named.
    """

    weights: int
    prunable: int
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the prunable share of all weights."""
        return self.prunable / self.weights if self.weights else 1.0

    def __str__(self) -> str:
        parts = [f"{named(list(names))} ({reason})" for reason, names in self.left.items()]
        dense = f" Left dense: {'; '.join(parts)}." if parts else ""
        return f"{100 * self.share:.1f} % of all {self.weights:,} weights.{dense}"


def coverage(
    model: nn.Module, layers: Iterable[Layer], reasons: Mapping[str, str] | None = None
) -> Coverage:
    """Return how much of a network some layers cover, and what is left.

    Args:
        model: the network.
        layers: the layers that may be pruned.
        reasons: why other layers are left dense, by name.
    """
    chosen, reasons = list(layers), reasons or {}
    everything = [p for p in model.parameters() if not is_lazy(p)]
    ours = {id(t) for layer in chosen for t in layer.tensors()}
    left: dict[str, list[str]] = {}
    told = set(ours)
    for layer in all_layers(model):
        weight = layer.weight_part.parameter(layer.module)
        if layer.name in reasons:
            left.setdefault(reasons[layer.name], []).append(layer.name)
            told.add(id(weight))
    for name, parameter, owner in _matrices(model):
        if id(parameter) not in told:
            what = EMBEDDING if isinstance(owner, nn.Embedding | nn.EmbeddingBag) else UNKNOWN
            left.setdefault(what, []).append(name)
    return Coverage(
        sum(p.numel() for p in everything), sum(layer.weight.numel() for layer in chosen), left
    )


def left_dense(
    model: nn.Module, layers: str | Iterable[str] | None, skip: str | Iterable[str]
) -> dict[str, str]:
    """Return why layers of known kinds stay dense, by name.

    Args:
        model: the network.
        layers: names or globs of the layers that are wanted; None for all.
        skip: names or globs of the layers to leave alone.
    """
    wanted, refused = {x.name for x in choose_layers(model, layers, skip)}, refused_layers(model)
    every = [layer.name for layer in all_layers(model)]
    reasons = {name: refused.get(name, "") if name in wanted else SKIPPED for name in every}
    return {name: reason for name, reason in reasons.items() if reason}


def warn_of(found: Coverage) -> None:
    """Give one warning that names what stays dense although nobody asked for it."""
    parts = [
        f"{named(list(names))} ({reason})"
        for reason, names in found.left.items()
        if reason not in _EXPECTED
    ]
    if parts:
        caution(
            f"{100 * found.share:.1f} % of all weights can be pruned. Left dense: "
            f"{'; '.join(parts)}."
        )


def _matrices(model: nn.Module) -> Iterable[tuple[str, Tensor, nn.Module]]:
    """Yield the name, the parameter and its owner of every matrix or larger array."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() > 1 and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{key}" if path else key, parameter, module
