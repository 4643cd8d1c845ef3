"""Time every implementation of one layer and choose the fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lobs._system.stopwatch import Samples, cache_bytes, median, speedup, take_turns
from lobs.deploy.accelerate.engines import ChainEngine, ConvEngine, Engine, weight_matrix
from lobs.deploy.accelerate.modules import fast_layer
from lobs.deploy.accelerate.native import MOST_SAMPLES, SlotMatrix, Storage, rounded
from lobs.deploy.accelerate.native_engines import BitmaskEngine, PlanesEngine, SlotsEngine
from lobs.deploy.accelerate.torch_engines import BsrEngine, CsrEngine, ShrunkEngine
from lobs.errors import CalibrationError, LobsError
from lobs.layers.convolution import Conv2dLayer
from lobs.layers.discovery import as_layer, is_plain_layer
from lobs.layers.linear import LinearLayer

KINDS = ("csr", "bsr", "compiled", "bitmask", "slots", "planes", "shared", "folded", "shrunk")
_FEW_SAMPLES = 2  # planes pay for more
_CHAIN_MAY_WIN = 0.6  # kept; above it each weight's column takes more time than a dense weight
_CSR_MAY_WIN = 0.3  # kept; above it torch's rows take several times as long as dense
_SLOTS_MAY_WIN = 0.5  # kept; above it bit masks are smaller and faster
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


@dataclass(frozen=True)
class Measuring:
    """How layers are measured.

    Args:
        margin: the smallest gain of a replacement, as a fraction.
        seconds: about how long to measure each layer.
        storage: how values are stored.
        cold: read so much memory before every call that weights leave the cache. In a network
            larger than the cache they are not there either. The code is.
        pack: take packed weights also where they are as fast as dense ones, give or take the
            margin: they will replace these.
    """

    margin: float
    seconds: float
    storage: Storage = "float32"
    cold: bool = False
    pack: bool = False

    def turns(self, contenders: Mapping[str, Callable[[], Any]], x: Tensor) -> Samples:
        """Return samples of the seconds per call of each contender.

        Args:
            contenders: functions to time, by name.
            x: their input, which is in the cache in any case.
        """
        if not self.cold:
            return take_turns(contenders, self.seconds)
        other, code = torch.zeros(cache_bytes() // 2), _small_calls(self.storage)

        def evict(name: str) -> None:
            other.sum()  # twice the cache
            x.sum()
            code.get(name, code["dense"])()

        return take_turns(contenders, self.seconds, before=evict)


@cache
def _small_calls(storage: Storage) -> dict[str, Callable[[], Any]]:
    """Return a call of each implementation on a small layer, which brings its code to the cache."""
    layer, x = nn.Linear(64, 16).eval().requires_grad_(False), torch.zeros(4, 64)
    with torch.no_grad():
        layer.weight[:, ::2] = 0
    calls = {kind: fast_layer(layer, make()) for kind, make in _engines(layer, x, storage).items()}
    return {kind: runner(module, x) for kind, module in {**calls, "dense": layer}.items()}


def replaceable(module: nn.Module) -> bool:
    """Return whether a module is a plain Linear, Conv2d or transformers' Conv1D in float32.

    Hooks and parametrisations rule it out, because a replacement would not call them.
    """
    if not isinstance(as_layer("", module), LinearLayer | Conv2dLayer):
        return False
    if parametrize.is_parametrized(module) or not is_plain_layer(module):
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or not isinstance(module.weight, nn.Parameter)
    ):
        return False
    weight = module.weight
    return bool(weight.is_cpu and weight.dtype == torch.float32 and weight.numel())


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map of the last dimension."""
    return isinstance(as_layer("", module), LinearLayer)


def measure_layer(
    name: str, layer: nn.Module, x: Tensor, measuring: Measuring, like: LayerTiming | None = None
) -> tuple[LayerTiming, nn.Module | None]:
    """Time a layer's implementations; return the times and the replacement, None if dense stays.

    Args:
        name: the layer's name.
        layer: a layer that `replaceable` accepts.
        x: the input to time it on.
        measuring: how to measure.
        like: the times of a layer of the same kind, which this one takes over.
    """
    storage = measuring.storage
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kept = float((weight != 0).float().mean())
    given = layer if storage == "float32" else rounded_layer(layer, storage)
    if like is not None:
        row = replace(like, name=name, kept=kept)
        if like.chosen == "dense":
            return row, None
        make = _engines(given, x, storage).get(like.chosen)
        fast = None if make is None else _working(given, make, x)
        return (row, fast) if fast is not None else (replace(row, chosen="dense", gain=1.0), None)
    candidates: dict[str, nn.Module] = {"dense": layer}
    if kept < 0.9 or storage != "float32" or _shrinks(layer):
        for kind, make in _engines(given, x, storage).items():
            fast = _working(given, make, x)
            if fast is not None:
                candidates[kind] = fast
    samples = measuring.turns({kind: runner(m, x) for kind, m in candidates.items()}, x)
    chosen, gain = best(samples, measuring.margin)
    if chosen not in ("bitmask", "slots") and measuring.pack and "bitmask" in samples:
        packed = speedup(samples[chosen], samples["bitmask"]).middle
        if packed > 1 - measuring.margin:
            chosen, gain = "bitmask", speedup(samples["dense"], samples["bitmask"]).middle
    crossover = _crossover(layer, x, kept, samples) if "compiled" in candidates and kept else None
    row = LayerTiming(
        name,
        tuple(weight.shape),
        kept,
        {k: median(s).middle for k, s in samples.items()},
        chosen,
        gain,
        crossover,
    )
    return row, None if chosen == "dense" else candidates[chosen]


def rounded_layer(layer: nn.Module, storage: Storage) -> nn.Module:
    """Return a copy of a layer whose weights are as a storage holds them."""
    twin, view = copy.deepcopy(layer), as_layer("", layer)
    assert view is not None
    matrix = rounded(weight_matrix(layer), storage)
    if not bool(matrix.isfinite().all()):
        raise LobsError(
            f"values='{storage}' cannot hold weights up to {float(layer.weight.abs().max()):.3g}: "  # type: ignore[operator]
            "use values='bfloat16'."
        )
    weight = view.folded(matrix.unflatten(0, (view.groups, -1)))  # type: ignore[no-untyped-call]
    twin.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return twin


def _shrinks(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | nn.Conv2d) and ShrunkEngine.suits(layer)


def _engines(layer: nn.Module, x: Tensor, storage: Storage) -> dict[str, Callable[[], Engine]]:
    """Return a maker for every engine that can compute a layer.

    Args:
        layer: the layer.
        x: its input.
        storage: how values are stored.
    """
    makers: dict[str, Callable[[], Engine]] = {}
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kept = float((weight != 0).float().mean())
    if is_linear(layer):
        if x.numel() <= MOST_SAMPLES * x.shape[-1]:
            makers["bitmask"] = lambda: BitmaskEngine([layer], x, storage)
            if kept <= _SLOTS_MAY_WIN and SlotMatrix.holds(x.shape[-1]):
                makers["slots"] = lambda: SlotsEngine([layer], x, storage)
        if x.numel() > _FEW_SAMPLES * x.shape[-1]:
            makers["planes"] = lambda: PlanesEngine([layer], x)
    if isinstance(layer, nn.Linear):
        if kept < _CHAIN_MAY_WIN:
            makers["compiled"] = lambda: ChainEngine([layer], [False], x)
        if kept < _CSR_MAY_WIN:
            makers["csr"] = lambda: CsrEngine([layer], x)
        if BsrEngine.suits(layer.weight):
            makers["bsr"] = lambda: BsrEngine([layer], x)
    elif isinstance(layer, nn.Conv2d):
        makers["compiled"] = lambda: ConvEngine([layer], x)
    if isinstance(layer, nn.Linear | nn.Conv2d) and ShrunkEngine.suits(layer):
        makers["shrunk"] = lambda: ShrunkEngine([layer], x)
    return makers


def _working(layer: nn.Module, make: Callable[[], Engine], x: Tensor) -> nn.Module | None:
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


def _crossover(layer: nn.Module, x: Tensor, kept: float, samples: Samples) -> float:
    """Estimate the kept fraction at which the compiled kernel is as fast as dense."""
    empty = copy.deepcopy(layer)
    empty.weight.zero_()  # type: ignore[operator]
    bare = fast_layer(empty, _engines(empty, x, "float32")["compiled"]())
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
