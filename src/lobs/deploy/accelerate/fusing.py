"""Fuse runs of Linear and ReLU into one compiled call.

Small networks spend most of their time between layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lobs._system.stopwatch import median, speedup, take_turns
from lobs.calibration.forward import call
from lobs.deploy.accelerate.engines import ChainEngine
from lobs.deploy.accelerate.layerwise import LayerTiming, best, close, replaceable, runner
from lobs.deploy.accelerate.modules import FastSequential, same_as
from lobs.layers.hooks import before_forward


def fuse(
    model: nn.Module, inputs: Mapping[str, Tensor], example: Any, margin: float, seconds: float
) -> tuple[nn.Module, list[LayerTiming]]:
    """Try runs of Linear and ReLU in every plain Sequential as one compiled call.

    Args:
        model: the network; it is changed.
        inputs: the first input of each replaceable layer, by name.
        example: a batch.
        margin: the smallest gain, as a fraction.
        seconds: about how long to measure each run.
    """
    rows = []
    for name, sequential in list(model.named_modules()):
        if type(sequential).forward is not nn.Sequential.forward:
            continue
        runs = []
        children = list(sequential.named_children())
        for start, stop in runs_of_linear(sequential):
            first = next(i for i in range(start, stop) if isinstance(children[i][1], nn.Linear))
            x = inputs.get(f"{name}.{children[first][0]}" if name else children[first][0])
            part = nn.Sequential(OrderedDict(children[start:stop]))
            if x is None:
                continue
            if (
                start < first
                and (given := _first_input(model, sequential[start], example)) is not None
            ):
                x = given
            row, engine = _measure_run(part, x, margin, seconds)
            rows.append(row)
            if engine is not None:
                runs.append((start, stop, engine))
        if runs:
            fast = same_as(FastSequential, sequential)
            fast.runs = runs
            model = replaced(model, name, fast)
    return model, rows


def runs_of_linear(sequential: nn.Sequential) -> list[tuple[int, int]]:
    """Return stretches of two or more modules that one compiled chain can compute.

    A stretch has Linear layers, each with or without a ReLU. A Flatten of all but the batch may
    come first. Dropout and Identity are passed over: they do nothing in eval mode.
    """
    modules = list(sequential)
    runs, at = [], 0
    while at < len(modules):
        stop = at + 1 if _flattens(modules[at]) else at
        while stop < len(modules) and _chains(
            modules[stop], stop > at and not _flattens(modules[stop - 1])
        ):
            stop += 1
        if sum(isinstance(m, nn.Linear) for m in modules[at:stop]) and stop - at > 1:
            runs.append((at, stop))
        at = max(stop, at + 1)
    return runs


def _chains(module: nn.Module, inside: bool) -> bool:
    if isinstance(module, nn.Linear):
        return replaceable(module) or hasattr(module, "engine")
    bare = not module._forward_hooks and not module._forward_pre_hooks
    return inside and bare and type(module) in (nn.ReLU, nn.Dropout, nn.Identity)


def _flattens(module: nn.Module) -> bool:
    return (
        type(module) is nn.Flatten
        and module.start_dim == 1
        and module.end_dim == -1
        and not module._forward_hooks
    )


def _measure_run(
    part: nn.Sequential, x: Tensor, margin: float, seconds: float
) -> tuple[LayerTiming, ChainEngine | None]:
    modules = list(part)
    layers = [m for m in modules if isinstance(m, nn.Linear)]
    plain = nn.Sequential(
        *[same_as(nn.Linear, m) if isinstance(m, nn.Linear) else m for m in modules]
    )
    engine = ChainEngine(layers, _relus(modules), x, flatten=_flattens(modules[0]))
    fused = same_as(FastSequential, part)
    fused.runs = [(0, len(modules), engine)]
    kept = sum(int((m.weight != 0).sum()) for m in layers) / sum(m.weight.numel() for m in layers)
    name = " + ".join(n for n, m in part.named_children() if isinstance(m, nn.Linear))
    shape = (layers[0].in_features, *(m.out_features for m in layers))
    samples = take_turns(
        {"dense": runner(plain, x), "single": runner(part, x), "compiled": runner(fused, x)},
        seconds,
    )
    times = {kind: median(taken).middle for kind, taken in samples.items()}
    chosen, gain = best({k: samples[k] for k in ("dense", "compiled")}, margin)
    better = chosen == "compiled" and speedup(samples["single"], samples["compiled"]).low > 1
    if not better or not close([fused(x)], [plain(x)]):
        return LayerTiming(
            name, shape, kept, times, "single" if chosen == "compiled" else "dense", 1.0
        ), None
    return LayerTiming(name, shape, kept, times, chosen, gain), engine


def _relus(modules: list[nn.Module]) -> list[bool]:
    """Return, for each Linear of a run, whether a ReLU follows before the next one."""
    relus: list[bool] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            relus.append(False)
        elif isinstance(module, nn.ReLU):
            relus[-1] = True
    return relus


def _first_input(model: nn.Module, module: nn.Module, example: Any) -> Tensor | None:
    found: list[Tensor] = []
    handle = before_forward(module, lambda _, args: found.append(args[0].detach().clone()))
    try:
        call(model, example)
    finally:
        handle.remove()
    return found[0] if found else None


def replaced(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Return the network with one of its modules, or all of it, replaced.

    Args:
        model: the network; it is changed.
        name: the module's name; empty for the network itself.
        module: the replacement.
    """
    if not name:
        return module
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, module)
    return model
