"""A skeleton: a network whose parameters are on the meta device and lie in a folder of shards.

Its blocks are read one at a time. Everything else, such as the embedding, is read when the network
reaches it, and only for as long as the network must run up to its first block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.batches import user_code
from lobs.calibration.blocks.base import StopRun
from lobs.calibration.blocks.rows import has_layers
from lobs.errors import BlocksError, LobsError
from lobs.layers import Layer, find_layers, watching
from lobs.layers.hooks import before_forward
from lobs.storage.shards import Shards


class Skeleton:
    """A network without weights, and the shards that hold them.

    Args:
        model: a network whose parameters are on the meta device, or a function that builds one. A
            function's parameters are put there as they are made; its buffers keep their values.
        shards: the weights.
    """

    def __init__(self, model: nn.Module | Callable[[], nn.Module], shards: Shards) -> None:
        self.model, self.shards = _built(model), shards
        self.sources = _sources(self.model, shards)
        self.blocks = _row(self.model)
        self.loaded = 0  # most bytes outside the blocks that a run has read
        _check_owned(self.model, self.blocks)

    def names_of(self, block: str) -> list[str]:
        """Return the names of a block's tensors in the shards.

        A tensor that is stored under another name only, such as a shared buffer, is not among them.
        """
        start = f"{block}."
        return [n for n in self.sources if n.startswith(start) and n in self.shards]

    def filled(self, block: str, shards: Shards | None = None) -> nn.Module:
        """Return a copy of a block with its tensors.

        Args:
            block: the block's name.
            shards: where the tensors are; the network's own by default.
        """
        module = copy.deepcopy(self.model.get_submodule(block))
        self._fill(module, f"{block}.", shards or self.shards)
        return module

    def layers_of(self, block: str, module: nn.Module, names: Sequence[str]) -> list[Layer]:
        """Return layers of a filled block, under their names in the network.

        Args:
            block: the block's name.
            module: the filled block.
            names: names of the layers.
        """
        parent, _, key = block.rpartition(".")
        home, empty = self.model.get_submodule(parent), self.model.get_submodule(block)
        setattr(home, key, module)
        try:
            return find_layers(self.model, names)
        finally:
            setattr(home, key, empty)

    @contextmanager
    def running(
        self, forward: Callable[..., Any], finished: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Let the network run, with `forward(block, *args, **kwargs)` in place of its blocks.

        A module outside the blocks is filled when it is first called, and emptied at the end. Once
        `finished()`, such a call ends the run instead.
        """
        outside = [
            (name, module)
            for name, module in self.model.named_modules()
            if not any(f"{name}.".startswith(f"{block}.") for block in self.blocks)
        ]
        filled: dict[str, list[tuple[dict[str, Any], str, Tensor]]] = {}
        count = 0

        def fill(name: str, module: nn.Module, _: Any) -> None:
            nonlocal count
            if finished():
                raise StopRun
            if name not in filled:
                prefix = f"{name}." if name else ""
                filled[name] = self._fill(module, prefix, self.shards, recurse=False)
                count += sum(old.numel() * old.element_size() for _, _, old in filled[name])

        replaced = [(vars(self.model.get_submodule(name)), name) for name in self.blocks]
        before = [table.get("forward") for table, _ in replaced]
        try:
            for table, name in replaced:
                table["forward"] = partial(forward, name)
            with watching(before_forward(m, partial(fill, name)) for name, m in outside):
                yield
        finally:
            for (table, _), own in zip(replaced, before, strict=True):
                table.pop("forward") if own is None else table.update(forward=own)
            for places in filled.values():
                for tensors, key, old in places:
                    tensors[key] = old
            self.loaded = max(self.loaded, count)

    def _fill(
        self, module: nn.Module, prefix: str, shards: Shards, *, recurse: bool = True
    ) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Put tensors into a module; return every place with what was there."""
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        sources = []
        for path, part in module.named_modules() if recurse else [("", module)]:
            own = f"{prefix}{path}." if path else prefix
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for table in tables:
                for key, tensor in table.items():
                    source = self.sources.get(own + key)
                    if source is not None:
                        places.append((table, key, tensor))
                        sources.append(source)
        # A finished block's shards lack what is stored under another block's name.
        homes = {source: shards if source in shards else self.shards for source in sources}
        for (_, _, old), source in zip(places, sources, strict=True):
            homes[source].check(source, old)
        found = dict[str, Tensor]()
        for home in {id(home): home for home in homes.values()}.values():
            found |= home.read([source for source, its in homes.items() if its is home])
        for (table, key, old), source in zip(places, sources, strict=True):
            new = found[source]
            table[key] = nn.Parameter(new, False) if isinstance(old, nn.Parameter) else new
        return places


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter on the meta device as it is registered; buffers keep their values."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else it is tied to another
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a copy of a network on the meta device, or the network that a function builds."""
    if isinstance(model, nn.Module):
        held = next((name for name, p in model.named_parameters() if not p.is_meta), None)
        if held is not None:
            raise LobsError(
                f"'{held}' is in memory, not on the meta device: give a function that builds the "
                "model, such as lambda: MyModel(config). Use lobs.prune for a network in memory."
            )
        return copy.deepcopy(model)
    if not callable(model):
        raise LobsError(
            f"model is a {type(model).__name__}: give a torch.nn.Module on the meta device, or a "
            "function that builds one."
        )
    with parameters_on_meta(), user_code("building the model"):
        made = model()
    if not isinstance(made, nn.Module):
        raise LobsError(
            f"the function that builds the model returned a {type(made).__name__}: return a "
            "torch.nn.Module."
        )
    return _built(made)


def _sources(model: nn.Module, shards: Shards) -> dict[str, str | None]:
    """Return the tensor in the shards for every name of the state dict; None: it has its value.

    A tied parameter may be stored under any one of its names.
    """
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[str, str | None] = {}
    for name, tensor in state.items():
        tied = next((n for n in names[id(tensor)] if n in shards), name)
        found[name] = name if name in shards else tied
        if not tensor.is_meta and tied not in shards:
            found[name] = None
        else:
            shards.check(found[name] or name, tensor)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and found.get(name) is None:
            raise LobsError(
                f"buffer '{name}' is on the meta device and in no shard: give a function that "
                "builds the model, such as lambda: MyModel(config), and its buffers stay real."
            )
    return found


def _row(model: nn.Module) -> list[str]:
    """Return the blocks: of the outermost module lists that hold blocks, the one of most weights.

    A block is a child with two layers or more.
    """
    rows: list[list[str]] = []
    for name, module in model.named_modules():
        within = any(f"{name}.".startswith(f"{block}.") for row in rows for block in row)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not within:
            prefix = f"{name}." if name else ""
            row = [prefix + key for key, part in module.named_children() if has_layers(part)]
            rows += [row] if len(row) > 1 else []
    if not rows:
        raise BlocksError(
            "the model has no torch.nn.ModuleList or Sequential of blocks with two layers or more. "
            "Use lobs.prune with the network in memory."
        )

    def weights(row: Sequence[str]) -> int:
        return sum(p.numel() for block in row for p in model.get_submodule(block).parameters())

    return max(rows, key=weights)


def _check_owned(model: nn.Module, blocks: Sequence[str]) -> None:
    """Refuse parameters of a block that are used elsewhere too."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for names in users.values():
        inside = any(name.startswith(f"{block}.") for name in names for block in blocks)
        if len(names) > 1 and inside:
            raise BlocksError(
                f"'{names[0]}' and '{names[1]}' share one parameter, but a block must own its "
                "weights. Untie them, or use lobs.prune with the network in memory."
            )


def same_form(out: Any) -> Callable[[Tensor], Any]:
    """Return a function that puts activations into a block's output in place of its own."""
    if isinstance(out, Tensor):
        return lambda x: x
    return lambda x: type(out)((x, *out[1:]))


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, on any device."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)
