"""One layer, every way it could be computed, and which of them is fastest here."""

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

_EXACT = 1e-4  # of the largest output: what another order of float32 sums may move


@dataclass(frozen=True)
class LayerTiming:
    """One layer, or a run of layers computed at once: seconds a call of every implementation, and the one chosen.

    `crossover` estimates the fraction of kept weights at which the compiled kernel would be no
    faster than dense, from its time at this fraction and its time with no weights at all.
    """

    name: str
    shape: tuple[int, ...]
    kept: float
    seconds: dict[str, float]
    chosen: str
    gain: float
    crossover: float | None = None


def replaceable(module: nn.Module) -> bool:
    """A plain Linear or Conv2d in float32 on the CPU, without hooks or parametrisations that a replacement would pass by."""
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
    """Time a layer every way that suits it; the module to put in its place, or None where dense stays."""
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
    """Every engine that could compute a layer."""
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
    """The layer with an engine, unless this build of torch lacks it or its answer is not the same."""
    try:
        fast = fast_layer(layer, make())
        return fast if close([fast(x)], [layer(x)]) else None
    except (RuntimeError, NotImplementedError, ImportError):
        return None


def best(samples: Samples, margin: float) -> tuple[str, float]:
    """The fastest that is faster than dense beyond margin and noise."""
    ratios = {
        kind: speedup(samples["dense"], taken) for kind, taken in samples.items() if kind != "dense"
    }
    sure = {kind: ratio.middle for kind, ratio in ratios.items() if ratio.low > 1 + margin}
    chosen = max(sure, key=lambda kind: sure[kind], default="dense")
    return chosen, sure.get(chosen, 1.0)


def _crossover(layer: nn.Linear | nn.Conv2d, x: Tensor, kept: float, samples: Samples) -> float:
    """Kept fraction at which the compiled kernel meets dense, on the line through this layer and an empty one."""
    empty = copy.deepcopy(layer)
    empty.weight.zero_()
    bare = fast_layer(empty, _engines(empty, x)["compiled"]())
    nothing = median(take_turns({"empty": runner(bare, x)}, 0.05)["empty"]).middle
    dense, now = median(samples["dense"]).middle, median(samples["compiled"]).middle
    return min(1.0, max(0.0, kept * (dense - nothing) / max(now - nothing, 1e-9)))


def runner(model: nn.Module, example: Any) -> Callable[[], Any]:
    """A call with nothing around it, so that small networks are not timed with our own overhead."""
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
    """Whether answers differ by no more than another order of sums explains."""
    pairs = list(zip(one, other, strict=True))
    return all(
        a.shape == b.shape and float((a - b).abs().max()) <= _EXACT * (1e-6 + float(b.abs().max()))
        for a, b in pairs
    )
