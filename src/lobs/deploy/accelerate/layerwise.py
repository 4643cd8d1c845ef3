"""Time every implementation of one layer and choose the fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lobs._system.stopwatch import Samples, median, speedup, take_turns
from lobs.deploy.accelerate.engines import ChainEngine, ConvEngine, Engine
from lobs.deploy.accelerate.modules import fast_layer
from lobs.deploy.accelerate.torch_engines import BsrEngine, CsrEngine, ShrunkEngine
from lobs.errors import CalibrationError

_EXACT = 1e-4  # relative to the largest output: what another order of float32 sums may change


@dataclass(frozen=True)
class LayerTiming:
    """Seconds per call of every implementation of a layer or fused run, and the chosen one.

    `crossover` estimates the kept fraction at which the compiled kernel is as fast as dense. It is
    interpolated from the times at this fraction and with no weights at all.
    """

    name: str
    shape: tuple[int, ...]
    kept: float
    seconds: dict[str, float]
    chosen: str
    gain: float
    crossover: float | None = None


def replaceable(module: nn.Module) -> bool:
    """Return whether a module is a plain Linear or Conv2d in float32 on the CPU.

    Hooks and parametrisations rule it out, because a replacement would not call them.
    """
    if type(module) not in (nn.Linear, nn.Conv2d) or parametrize.is_parametrized(module):
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or not isinstance(module.weight, nn.Parameter)
    ):
        return False
    return bool(
        module.weight.is_cpu and module.weight.dtype == torch.float32 and module.weight.numel()
    )


def measure_layer(
    name: str, layer: nn.Module, x: Tensor, margin: float, seconds: float
) -> tuple[LayerTiming, nn.Module | None]:
    """Time a layer's implementations; return the times and the replacement, None if dense stays.

    Args:
        name: the layer's name.
        layer: a Linear or Conv2d.
        x: the input to time it on.
        margin: the smallest gain, as a fraction.
        seconds: about how long to measure.
    """
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    kept = float((layer.weight != 0).float().mean())
    candidates: dict[str, nn.Module] = {"dense": layer}
    if kept < 0.9 or ShrunkEngine.suits(layer):
        for kind, make in _engines(layer, x).items():
            fast = _working(layer, make, x)
            if fast is not None:
                candidates[kind] = fast
    samples = take_turns({kind: runner(module, x) for kind, module in candidates.items()}, seconds)
    chosen, gain = best(samples, margin)
    crossover = _crossover(layer, x, kept, samples) if "compiled" in candidates and kept else None
    row = LayerTiming(
        name,
        tuple(layer.weight.shape),
        kept,
        {k: median(s).middle for k, s in samples.items()},
        chosen,
        gain,
        crossover,
    )
    return row, None if chosen == "dense" else candidates[chosen]


def _engines(layer: nn.Module, x: Tensor) -> dict[str, Callable[[], Engine]]:
    """Return a maker for every engine that can compute a layer."""
    makers: dict[str, Callable[[], Engine]] = {}
    if isinstance(layer, nn.Linear):
        makers["compiled"] = lambda: ChainEngine([layer], [False], x)
        makers["csr"] = lambda: CsrEngine([layer], x)
        if BsrEngine.suits(layer.weight):
            makers["bsr"] = lambda: BsrEngine([layer], x)
    elif isinstance(layer, nn.Conv2d):
        makers["compiled"] = lambda: ConvEngine([layer], x)
    if isinstance(layer, nn.Linear | nn.Conv2d) and ShrunkEngine.suits(layer):
        makers["shrunk"] = lambda: ShrunkEngine([layer], x)
    return makers


def _working(
    layer: nn.Linear | nn.Conv2d, make: Callable[[], Engine], x: Tensor
) -> nn.Module | None:
    """Return the layer with an engine; None if torch lacks it or the output differs."""
    try:
        fast = fast_layer(layer, make())
        return fast if close([fast(x)], [layer(x)]) else None
    except (RuntimeError, NotImplementedError, ImportError):
        return None


def best(samples: Samples, margin: float) -> tuple[str, float]:
    """Return the fastest implementation that beats dense by margin and noise, and its gain."""
    ratios = {
        kind: speedup(samples["dense"], taken) for kind, taken in samples.items() if kind != "dense"
    }
    sure = {kind: ratio.middle for kind, ratio in ratios.items() if ratio.low > 1 + margin}
    chosen = max(sure, key=lambda kind: sure[kind], default="dense")
    return chosen, sure.get(chosen, 1.0)


def _crossover(layer: nn.Linear | nn.Conv2d, x: Tensor, kept: float, samples: Samples) -> float:
    """Estimate the kept fraction at which the compiled kernel is as fast as dense."""
    empty = copy.deepcopy(layer)
    empty.weight.zero_()
    bare = fast_layer(empty, _engines(empty, x)["compiled"]())
    nothing = median(take_turns({"empty": runner(bare, x)}, 0.05)["empty"]).middle
    dense, now = median(samples["dense"]).middle, median(samples["compiled"]).middle
    return min(1.0, max(0.0, kept * (dense - nothing) / max(now - nothing, 1e-9)))


def runner(model: nn.Module, example: Any) -> Callable[[], Any]:
    """Return a bare call of the network, without overhead that would distort small timings."""
    if isinstance(example, Mapping):
        return lambda: model(**example)
    x = example[0] if isinstance(example, tuple | list) else example
    if not isinstance(x, Tensor):
        raise CalibrationError(
            f"cannot run an example of type {type(x).__name__}: give a tensor, a tuple or keyword "
            "arguments."
        )
    return lambda: model(x)


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether outputs differ by no more than another order of sums explains."""
    pairs = list(zip(one, other, strict=True))
    return all(
        a.shape == b.shape and float((a - b).abs().max()) <= _EXACT * (1e-6 + float(b.abs().max()))
        for a, b in pairs
    )
