"""Find mixtures of experts, and take experts out of them.

transformers keeps a mixture's experts in one module, whose parameters have one entry for each
expert. A router beside it gives every token the numbers and the weights of its best experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lobs.layers.functional import plain_experts


@dataclass(frozen=True, eq=False)
class Mixture:
    """A block with experts and a router.

    Args:
        name: path of the experts in the network.
        experts: the module whose parameters hold all experts.
        router: the module that chooses experts for every token.
        groups: number of groups of experts that the router chooses first, of equal size.
    """

    name: str
    experts: nn.Module
    router: nn.Module
    router_name: str
    groups: int

    @property
    def size(self) -> int:
        """Return the number of experts."""
        return int(self.experts.num_experts)  # type: ignore[arg-type]

    @property
    def chosen(self) -> int:
        """Return the number of experts of one token."""
        return int(self.router.top_k)  # type: ignore[arg-type]

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters with an entry for each expert, by their names in the network."""
        parts = ((self.name, self.experts), (self.router_name, self.router))
        return {
            f"{path}.{key}" if path else key: p
            for path, module in parts
            for key, p in module.named_parameters()
            if p.dim() and len(p) == self.size
        }

    def route(self, hidden: Tensor, gone: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts, without those that are gone.

        Args:
            hidden: the tokens.
            gone: numbers of experts that are not there.
        """
        router, numbers = self.router, None
        if gone is not None and len(gone):
            router, numbers = copy.deepcopy(router), _others(self.size, gone)
            without(router, self.size, gone)
        weights, index = routes(router.forward(hidden))
        return weights, index if numbers is None else numbers.to(index.device)[index]

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts with these numbers and weights give for tokens."""
        with plain_experts(self.experts):
            out: Tensor = self.experts.forward(hidden, index, weights)
        return out


def mixtures(model: nn.Module) -> list[Mixture]:
    """Return all mixtures of a network, in the order of the module tree."""
    found = []
    for path, block in model.named_modules():
        for key, experts in block.named_children():
            if not _holds_experts(experts):
                continue
            routers = [
                (name, other)
                for name, other in block.named_children()
                if other is not experts and _chooses(other, int(experts.num_experts))
            ]
            if len(routers) == 1:
                name, router = routers[0]
                groups = int(getattr(router, "num_group", None) or 1)
                start = f"{path}." if path else ""
                found.append(Mixture(f"{start}{key}", experts, router, f"{start}{name}", groups))
    return found


def _holds_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters())
    stacked = [p for p in own if p.dim() == 3]
    return type(count) is int and len(stacked) > 1 and all(len(p) == count for p in own)


def _chooses(module: nn.Module, experts: int) -> bool:
    own = list(module.parameters(recurse=False))
    return (
        type(getattr(module, "top_k", None)) is int
        and bool(own)
        and all(len(p) == experts for p in own if p.dim())
    )


def routes(answer: Any) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers in a router's answer."""
    parts = [t for t in answer if isinstance(t, Tensor)]
    (index,) = (t for t in parts if not t.is_floating_point())
    weights = next(t for t in reversed(parts) if t.shape == index.shape and t is not index)
    return weights, index


def without(module: nn.Module, size: int, gone: Tensor) -> None:
    """Take experts out of a module, in place.

    Args:
        module: the experts, or their router.
        size: number of experts before.
        gone: numbers of those that go.
    """
    stay = _others(size, gone)
    for part in module.modules():
        for key, p in part._parameters.items():
            if p is not None and p.dim() and len(p) == size:
                part._parameters[key] = nn.Parameter(p.detach()[stay.to(p.device)], p.requires_grad)
        for key, b in part._buffers.items():
            if b is not None and b.dim() and len(b) == size:
                part._buffers[key] = b[stay.to(b.device)]
    _count(vars(module), size, len(stay))


def remove(model: nn.Module, gone: dict[str, Tensor]) -> None:
    """Take experts out of a network, in place, and out of its configuration.

    Args:
        model: the network.
        gone: numbers of the experts that go, by the mixture's name.
    """
    sizes = {}
    for mixture in mixtures(model):
        size, going = mixture.size, gone[mixture.name]
        sizes[size] = size - len(going)
        for module in (mixture.experts, mixture.router):
            without(module, size, going)
    for size, left in sizes.items():
        for module in model.modules():
            _count(vars(module), size, left)
        for config in {id(c): c for m in model.modules() for c in _configs(m)}.values():
            _count(vars(config), size, left)


def _count(fields: dict[str, Any], size: int, left: int) -> None:
    """Correct the numbers in a module's attributes, or in a configuration."""
    for name, value in list(fields.items()):
        if type(value) is not int:
            continue
        if name == "top_k" or "experts_per_tok" in name:
            fields[name] = min(value, left)
        elif "expert" in name and "shared" not in name and value == size:
            fields[name] = left


def _configs(module: nn.Module) -> Iterator[Any]:
    """Yield a module's configuration, and those inside it."""
    waiting = [getattr(module, "config", None)]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "to_dict"):
            yield config
            waiting += [value for value in vars(config).values() if hasattr(value, "to_dict")]


def _others(size: int, gone: Tensor) -> Tensor:
    stay = torch.ones(size, dtype=torch.bool)
    stay[gone] = False
    return stay.nonzero().squeeze(1)
