"""Keep removed weights at zero while a network is trained further, with any optimiser.

`hold` hooks three places. Gradients of removed weights are zeroed as they arrive, so that clipping
and line searches see the pruned network only. Before a step, gradients set by hand are zeroed too.
After a step, weights and optimiser state (momentum, Adam's moments) are filled with zeros. They are
filled, not multiplied, because zero times an infinity or a NaN is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lobs.errors import MaskError
from lobs.layers.hooks import after_step, before_step, on_gradient

_WRAPPERS = ("_orig_mod.", "module.")  # torch.compile; DataParallel, AveragedModel


class Hold:
    """The hooks that `hold` places. `remove` or the end of a `with` block removes them."""

    def __init__(
        self, model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | None = None
    ) -> None:
        self.masks = dict(masks)
        self._slots = {name: _find(model, name) for name in self.masks}
        self._removed = {
            name: ~_checked(name, mask, self._tensor(name)) for name, mask in self.masks.items()
        }
        self._clean: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._handles: list[Any] = []
        if optimizer is not None:
            optimizer = self._checked_optimizer(optimizer)
        self._zero_weights()
        for name in self.masks:
            tensor = self._tensor(name)
            if tensor.requires_grad:
                self._handles.append(on_gradient(tensor, self._zero_gradient(name)))
        if optimizer is None:  # hook all optimisers; a step of another network's changes nothing
            self._handles.append(before_step(None, self._before))
            self._handles.append(after_step(None, self._after))
        else:
            self._before(optimizer)
            self._handles.append(before_step(optimizer, self._before))
            self._handles.append(after_step(optimizer, self._after))

    def __repr__(self) -> str:
        removed = sum(int(gone.sum()) for gone in self._removed.values())
        active = "" if self._handles else ", hooks removed"
        return f"Hold({removed:,} weights of {len(self.masks)} tensors at zero{active})"

    def apply(self) -> None:
        """Zero the removed weights now, for code that changes weights without an optimiser."""
        self._zero_weights()

    def remove(self) -> None:
        """Remove all hooks. The zeros stay until something changes them."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _checked_optimizer(self, optimizer: Any) -> Optimizer:
        """Return the innermost optimiser; refuse one that steps none of the masked parameters."""
        # Hugging Face Accelerate wraps optimisers.
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not hasattr(optimizer, "param_groups"):
            raise MaskError(
                f"optimizer is a {type(optimizer).__name__}: give a torch.optim optimiser."
            )
        trained = [name for name in self.masks if self._tensor(name).requires_grad]
        if trained and not self._held_by(optimizer):
            raise MaskError(
                f"the optimizer holds none of the masked parameters, such as '{trained[0]}', so it "
                "trains another network: pass one made from this network's parameters, such as "
                f"torch.optim.{type(optimizer).__name__}(model.parameters(), …)."
            )
        return optimizer  # type: ignore[no-any-return]

    def _tensor(self, name: str) -> Tensor:
        module, key = self._slots[name]
        tensor = getattr(module, key)
        assert isinstance(tensor, Tensor)
        return tensor

    def _gone(self, name: str, like: Tensor) -> Tensor:
        """Return where a tensor must be zero, on the device of `like`."""
        if self._removed[name].device != like.device:
            self._removed[name] = self._removed[name].to(like.device)
        return self._removed[name]

    def _zero_gradient(self, name: str) -> Callable[[Tensor], Tensor]:
        def zero(gradient: Tensor) -> Tensor:
            return (
                gradient
                if gradient.is_sparse
                else gradient.masked_fill(self._gone(name, gradient), 0)
            )

        return zero

    @torch.no_grad()
    def _zero_weights(self, names: Iterable[str] | None = None) -> None:
        for name in self.masks if names is None else names:
            tensor = self._tensor(name)
            tensor.masked_fill_(self._gone(name, tensor), 0)

    @torch.no_grad()
    def _zero_state(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._tensor(name)
            for value in optimizer.state.get(tensor, {}).values():
                # Step counters and factored moments have other shapes. For a scalar weight the
                # shapes agree, so scalars are left alone.
                if isinstance(value, Tensor) and value.shape == tensor.shape and value.dim():
                    value.masked_fill_(self._gone(name, value), 0)
        self._clean[optimizer] = optimizer.state

    def _held_by(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the masked parameters that an optimiser steps."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [name for name in self.masks if id(self._tensor(name)) in stepped]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        names = self._held_by(optimizer)
        for name in names:
            tensor = self._tensor(name)
            if tensor.grad is not None and not tensor.grad.is_sparse:
                with torch.no_grad():
                    tensor.grad.masked_fill_(self._gone(name, tensor.grad), 0)
        # Old state may still move removed weights. Loading a state replaces the dictionary.
        if names and self._clean.get(optimizer) is not optimizer.state:
            self._zero_state(optimizer, names)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        names = self._held_by(optimizer)
        if names:
            self._zero_weights(names)
            self._zero_state(optimizer, names)


def hold(model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> Hold:
    """Keep the weights that `masks` removes at exactly zero through training.

    They are zeroed at once and after every optimiser step, with their gradients and optimiser
    state. It works with any `torch.optim` optimiser, weight decay, gradient accumulation,
    `GradScaler` and LBFGS. A deep copy of the network keeps its zeros but not the hooks: hold the
    copy too if it is trained.

    Args:
        model: the network; it may be wrapped in `torch.compile`, `DataParallel` or `AveragedModel`.
        masks: True = kept, by name in the state dict, such as `PruningResult.masks` or
            `lobs.load(path).masks`.
        optimizer: the optimiser to hook; it must hold masked parameters. Without it, every
            optimiser that steps one of them is hooked.

    Example:
        >>> import torch, lobs
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        >>> with lobs.hold(layer, {"weight": torch.tensor([[True, False]])}, optimizer):
        ...     layer(torch.ones(1, 2)).sum().backward()
        ...     _ = optimizer.step()
        >>> layer.weight[0, 1].item()
        0.0
    """
    if not isinstance(masks, Mapping):
        raise MaskError(
            f"masks is a {type(masks).__name__}: write hold(model, result.masks, optimizer)."
        )
    return Hold(model, masks, optimizer)


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, int]:
    """Zero the removed weights once; return how many of each tensor were not zero."""
    revived = {}
    for name, mask in masks.items():
        module, key = _find(model, name)
        tensor = getattr(module, key)
        gone = ~_checked(name, mask, tensor)
        revived[name] = int((tensor[gone] != 0).sum())
        tensor.masked_fill_(gone, 0)
    return revived


def _find(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and the attribute that hold a tensor of the state dict."""
    prefix, _, key = name.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    # The exact name comes first: a network may have a part of its own with a wrapper's name.
    inside = (
        module for module_name, module in modules.items() if prefix == _bare(module_name, name)
    )
    for module in (modules.get(prefix), *inside):
        if isinstance(getattr(module, key, None), Tensor):
            assert module is not None
            return module, key
    raise MaskError(
        f"mask '{name}' names no parameter of the network: give the masks of this network."
    )


def _bare(module_name: str, name: str) -> str:
    """Return a module's name without a wrapper's prefix, unless the mask's name has it too."""
    for wrapper in _WRAPPERS:
        if wrapper not in name:
            module_name = f"{module_name}.".replace(wrapper, "").removesuffix(".")
    return module_name


def _checked(name: str, mask: Tensor, tensor: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != tensor.shape:
        raise MaskError(
            f"mask '{name}' is {mask.dtype} {tuple(mask.shape)}; it must be bool "
            f"{tuple(tensor.shape)}."
        )
    return mask.detach().to(tensor.device)
