"""Place hooks, and remove every hook that was placed, also after an exception.

This is the only file that registers hooks, on modules, on tensors and on optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Undo = Callable[[], None]


class Removable(Protocol):
    """Describe a placed hook."""

    def remove(self) -> None:
        """Remove the hook."""


def before_forward(
    module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False
) -> Removable:
    """Call `hook(module, args)` before every forward pass of a module.

    Args:
        module: the module to observe.
        hook: the function to call. If it returns a value, that replaces the arguments.
        with_kwargs: call `hook(module, args, kwargs)` instead.
    """
    return module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)


def after_forward(module: nn.Module, hook: Callable[..., Any]) -> Removable:
    """Call `hook(module, args, output)` after every forward pass; its value replaces the output."""
    return module.register_forward_hook(hook)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Removable:
    """Call `hook(gradient)` when a tensor's gradient is computed; its value replaces it."""
    handle: Removable = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def before_step(optimizer: Optimizer | None, hook: Callable[..., None]) -> Removable:
    """Call `hook(optimizer, args, kwargs)` before every step; None stands for all optimisers."""
    if optimizer is None:
        return register_optimizer_step_pre_hook(hook)
    return optimizer.register_step_pre_hook(hook)


def after_step(optimizer: Optimizer | None, hook: Callable[..., None]) -> Removable:
    """Call `hook(optimizer, args, kwargs)` after every step; None stands for all optimisers."""
    if optimizer is None:
        return register_optimizer_step_post_hook(hook)
    return optimizer.register_step_post_hook(hook)


class Handle:
    """Undo one observation; removing it a second time does nothing."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def remove(self) -> None:
        """Undo everything, in reverse order."""
        while self._undo:
            self._undo.pop()()

    @classmethod
    def of(cls, *starts: Callable[[], Undo]) -> Handle:
        """Start observations, each of which returns its undo function; if one fails, undo all."""
        handle = cls()
        try:
            for start in (_leave_fast_path, *starts):
                handle._undo.append(start())
        except BaseException:
            handle.remove()
            raise
        return handle


_lock = Lock()
_watching: set[object] = set()  # tokens: an interrupted observation cannot miscount
_was_enabled = True


def _leave_fast_path() -> Undo:
    """Switch torch's fused transformer kernels off while a layer is observed: they skip modules."""
    global _was_enabled  # noqa: PLW0603 - torch's own switch is global too
    token = object()
    with _lock:
        if not _watching:
            _was_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _watching.add(token)
    return partial(_return_to_fast_path, token)


def _return_to_fast_path(token: object) -> None:
    with _lock:
        _watching.discard(token)
        if not _watching:
            torch.backends.mha.set_fastpath_enabled(_was_enabled)


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """If this block fails, restore the hooks, modes and attributes of all modules.

    Everything is undone where it is done. But Ctrl-C may arrive between a step and its undo.
    """
    before = [(m, dict(vars(m)), _hooks(m)) for m in model.modules()]
    watching = set(_watching)
    try:
        yield
    except BaseException:
        for module, own, hooks in before:
            for placed, known in zip(_hook_tables(module), hooks, strict=True):
                for key in [key for key in placed if key not in known]:
                    del placed[key]
            vars(module).clear()
            vars(module).update(own)
        for token in _watching - watching:
            _return_to_fast_path(token)
        raise


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [dict(table) for table in _hook_tables(module)]


@contextmanager
def watching(observations: Iterable[Removable]) -> Iterator[None]:
    """Observe while the block runs.

    Give a generator: if one observation fails to start, those before it are removed.
    """
    with ExitStack() as stack:
        for handle in observations:
            stack.callback(handle.remove)
        yield
