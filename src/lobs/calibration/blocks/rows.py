"""Find the rows of blocks in a network: each block is fed by the one before it.

The network runs once on one batch. A row of blocks ends where something else happens between two
blocks, such as a skip connection over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.blocks.arguments import Arguments, flowing
from lobs.calibration.blocks.base import StopRun
from lobs.calibration.forward import call
from lobs.layers import Layer, watching
from lobs.layers.discovery import is_plain_layer
from lobs.layers.hooks import Removable, after_forward, before_forward


@dataclass(frozen=True)
class Row:
    """Blocks that feed each other; `uniform` if all get the first one's other arguments."""

    blocks: list[str]
    uniform: bool


def candidates(model: nn.Module, *, outermost: bool = False) -> list[str]:
    """Return the innermost children of module lists that hold two layers or more.

    Args:
        model: the network.
        outermost: return the outermost ones instead.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            prefix = f"{name}." if name else ""
            inside = [prefix + child for child, part in module.named_children() if has_layers(part)]
            found += inside if len(inside) > 1 else []
    if outermost:
        return [a for a in found if not any(a.startswith(f"{b}.") for b in found)]
    return [a for a in found if not any(b.startswith(f"{a}.") for b in found)]


def has_layers(module: nn.Module) -> bool:
    """Return whether a module holds two layers or more."""
    return sum(map(is_plain_layer, module.modules())) > 1


@dataclass(frozen=True)
class _Call:
    name: str
    x: Tensor | None = None
    others: Arguments | None = None  # None: a layer outside all blocks


def look(model: nn.Module, batch: Any, layers: Sequence[Layer], names: Sequence[str]) -> list[Any]:
    """Run a network once; return its rows as (blocks, uniform, layers outside), or nothing.

    Args:
        model: the network.
        batch: what to run it on.
        layers: its layers.
        names: modules that may be blocks.
    """
    inside = {n: any(n.startswith(f"{block}.") for block in names) for n in _all_names(layers)}
    if not names or any(len({inside[n] for n in layer.names}) > 1 for layer in layers):
        return []
    if any(layer.tied and inside[layer.name] for layer in layers):
        return []
    outside = [layer for layer in layers if not inside[layer.name]]
    calls, outs = _watched(model, batch, names, outside)
    run = [c.name for c in calls if c.others is not None]
    if sorted(run) != sorted(names):  # a block that runs twice, or not at all
        return []
    plan: list[tuple[list[str], bool, list[str]]] = []
    first: Arguments | None = None
    before: _Call | None = None
    for now in calls:
        if now.others is None:
            if before is not None and before.others is None:
                plan[-1][2].append(now.name)
            else:
                plan.append(([], True, [now.name]))
        elif now.x is None or outs[now.name] is None:
            return []
        elif before is not None and outs.get(before.name) is now.x and first is not None:
            blocks, uniform, _ = plan[-1]
            plan[-1] = ([*blocks, now.name], uniform and first.same(now.others), [])
        else:
            plan.append(([now.name], True, []))
            first = now.others
        before = now
    rows = [blocks for blocks, _, _ in plan if blocks]
    if 2 * len(rows) > len(names):
        return []
    if not all(_repeats(model, blocks, calls, outs) for blocks in rows):
        return []
    others = [blocks for blocks, uniform, _ in plan if not uniform]
    if not all(_steady(model, batch, blocks, calls) for blocks in others):
        return []
    return [list(item) for item in plan]


def _repeats(
    model: nn.Module,
    blocks: Sequence[str],
    calls: Sequence[_Call],
    outs: Mapping[str, Tensor | None],
) -> bool:
    """Return whether a row of blocks, run one by one, gives what it gave in the network."""
    called = {c.name: c for c in calls}
    x = called[blocks[0]].x
    for name in blocks:
        others = called[name].others
        if x is None or others is None:
            return False
        x = flowing(others.run(model.get_submodule(name), x.clone()))
    wanted = outs[blocks[-1]]
    return x is not None and wanted is not None and torch.allclose(x, wanted, 1e-2, 1e-4)


def _all_names(layers: Sequence[Layer]) -> list[str]:
    return [name for layer in layers for name in layer.names]


def _watched(
    model: nn.Module,
    batch: Any,
    names: Sequence[str],
    outside: Sequence[Layer],
    change: float = 1.0,
) -> tuple[list[_Call], dict[str, Tensor | None]]:
    """Return the calls of blocks and of layers outside them, in order, and the blocks' outputs.

    Every output is multiplied by `change`.
    """
    calls: list[_Call] = []
    outs: dict[str, Tensor | None] = {}

    def enter(name: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        calls.append(_Call(name, *Arguments.of(args, kwargs)))

    def leave(name: str, _module: nn.Module, _args: Any, out: Any) -> Any:
        outs[name] = x = flowing(out)
        if change == 1.0 or x is None:
            return None
        moved = x * change
        return moved if isinstance(out, Tensor) else type(out)((moved, *out[1:]))

    def note(name: str, _x: Tensor) -> None:
        if not any(c.name == name for c in calls):
            calls.append(_Call(name))

    def hooks() -> Iterator[Removable]:
        for name in names:
            module = model.get_submodule(name)
            yield before_forward(module, partial(enter, name), with_kwargs=True)
            yield after_forward(module, partial(leave, name))
        for layer in outside:
            yield layer.on_input(partial(note, layer.name))

    with watching(hooks()):
        call(model, batch)
    return calls, outs


def _steady(model: nn.Module, batch: Any, blocks: Sequence[str], calls: Sequence[_Call]) -> bool:
    """Return whether a row's other arguments stay when the activations of its blocks change."""
    moved, _ = _watched(model, batch, blocks, [], change=1.01)
    before = {c.name: c.others for c in calls}
    return len(moved) == len(blocks) and all(
        now.others is not None and now.others.same(before[now.name], torch.equal)  # type: ignore[arg-type]
        for now in moved
    )


def captured(model: nn.Module, batch: Any, row: Row) -> tuple[Tensor, dict[str, Arguments]]:
    """Run a network up to a row of blocks; return its input and the blocks' other arguments."""
    start: list[Tensor] = []
    found: dict[str, Arguments] = {}
    wanted = row.blocks[:1] if row.uniform else row.blocks

    def enter(name: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        x, found[name] = Arguments.of(args, kwargs)
        if name == row.blocks[0] and x is not None:
            start.append(x.detach().clone())
        if name == wanted[-1]:
            raise StopRun

    with (
        watching(
            before_forward(model.get_submodule(n), partial(enter, n), with_kwargs=True)
            for n in wanted
        ),
        suppress(StopRun),
    ):
        call(model, batch)
    return start[0], {name: found.get(name, found[row.blocks[0]]) for name in row.blocks}
