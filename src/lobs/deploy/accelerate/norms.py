"""Batch norms folded into the convolutions before them, for networks in eval mode.

The convolution's engine computes both. It marks its output, and the batch norm lets a marked input
pass. Parameters, statistics and state dicts stay as they were. A convolution that is called by
itself then returns normalised values; with a hook on it, it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lobs._system.stopwatch import median
from lobs.deploy.accelerate.engines import ConvEngine, Engine
from lobs.deploy.accelerate.fusing import replaced
from lobs.deploy.accelerate.layerwise import LayerTiming, Measuring, best, close
from lobs.deploy.accelerate.modules import fast_layer, same_as
from lobs.layers.graph import TraceError, trace

_MARK = "_lobs_normalised_by"  # attribute of a tensor: the batch norm whose work is done


class FoldedNorm(nn.BatchNorm2d):
    """A batch norm that the convolution before it may have computed already."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a marked input as it is, others normalised."""
        if getattr(x, _MARK, None) is self:
            return x
        return super().forward(x)


class _Marking(Engine):
    """Mark what an engine returns as normalised."""

    def run(self, x: Tensor) -> Tensor:
        """Return the output of convolution and batch norm."""
        out = super().run(x)  # type: ignore[safe-super]
        setattr(out, _MARK, self.norm)
        return out


class _Dense(Engine):
    """Compute a convolution densely, with folded weights."""

    def prepare(self) -> None:
        """Fold the batch norm."""
        self.weight, self.bias = self.numbers()

    def fits(self, x: Tensor) -> bool:
        """Return whether the input has the right channels."""
        return x.dim() == 4 and x.shape[1] == self.layers[0].in_channels

    def run(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        out: Tensor = self.layers[0]._conv_forward(x, self.weight, self.bias)
        return out


class FoldedDense(_Marking, _Dense):
    """A dense convolution with its batch norm."""

    name = "dense, folded"


class FoldedConv(_Marking, ConvEngine):
    """A sparse convolution with its batch norm."""

    name = "compiled, folded"


def fold_norms(
    model: nn.Module, inputs: Mapping[str, Tensor], example: Any, measuring: Measuring
) -> list[LayerTiming]:
    """Fold batch norms into the convolutions before them where that is faster.

    Args:
        model: the network; it is changed.
        inputs: the first input of each replaceable layer, by name.
        example: a batch.
        measuring: how to measure.
    """
    rows, pays = [], {}
    for name, place in _pairs(model, inputs, example):
        conv, norm, x = model.get_submodule(name), model.get_submodule(place), inputs[name]
        fast, passing = _folded(conv, norm, x)
        kind = type(fast.engine), conv.weight.shape, x.shape, str(conv.stride)
        if kind not in pays:
            row = _measure(f"{name} + {place}", (conv, norm), (fast, passing), x, measuring)
            rows.append(row)
            pays[kind] = row.chosen == "folded"
        if pays[kind]:
            replaced(model, name, fast)
            replaced(model, place, passing)
    return rows


def _folded(conv: nn.Module, norm: nn.Module, x: Tensor) -> tuple[Any, nn.Module]:
    """Return a convolution that computes its batch norm too, and a batch norm that knows it."""
    made = FoldedConv if isinstance(getattr(conv, "engine", None), ConvEngine) else FoldedDense
    engine, passing = made.__new__(made), same_as(FoldedNorm, norm)
    engine.norm = passing
    engine.__init__([conv], x)  # type: ignore[misc]
    return fast_layer(conv, engine), passing


def _pairs(model: nn.Module, inputs: Mapping[str, Tensor], example: Any) -> list[tuple[str, str]]:
    """Return names of convolutions whose output only a batch norm reads, and of these norms."""
    norms = [m for m in model.modules() if type(m) is nn.BatchNorm2d]
    if not norms:
        return []
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        nodes = trace(model, example, leaves=frozenset(map(id, [*norms, *convs]))).graph.nodes
    except TraceError:
        return []
    calls = [node for node in nodes if node.op == "call_module"]
    once = [str(node.target) for node in calls]
    found = []
    for node in calls:
        readers = list(node.users)
        if len(readers) != 1 or readers[0].op != "call_module":
            continue
        name, place = str(node.target), str(readers[0].target)
        if name in inputs and once.count(name) == once.count(place) == 1:
            conv, norm = model.get_submodule(name), model.get_submodule(place)
            if _foldable(conv, norm):
                found.append((name, place))
    return found


def _foldable(conv: nn.Module, norm: nn.Module) -> bool:
    """Return whether a batch norm has fixed statistics, and the engines know the convolution."""
    if not isinstance(conv, nn.Conv2d) or type(norm) is not nn.BatchNorm2d:
        return False
    if norm.running_mean is None or norm.running_var is None or norm.training:
        return False
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    engine = getattr(conv, "engine", None)
    return not hooked and (engine is None or isinstance(engine, ConvEngine))


def _measure(
    name: str,
    single: tuple[nn.Module, nn.Module],
    folded: tuple[nn.Module, nn.Module],
    x: Tensor,
    measuring: Measuring,
) -> LayerTiming:
    """Time a pair both ways.

    Args:
        name: the pair's name.
        single: convolution and batch norm as they are.
        folded: the same as one call.
        x: the convolution's input.
        measuring: how to measure.
    """
    turns = {"dense": lambda: single[1](single[0](x)), "folded": lambda: folded[1](folded[0](x))}
    samples = measuring.turns(turns, x)
    chosen, gain = best(samples, 0.0)
    if chosen == "folded" and not close([turns["folded"]()], [turns["dense"]()]):
        chosen, gain = "dense", 1.0
    weight: Any = single[0].weight
    times = {"single": median(samples["dense"]).middle, "folded": median(samples["folded"]).middle}
    kept = float((weight != 0).float().mean())
    chosen = "folded" if chosen == "folded" else "single"
    return LayerTiming(name, tuple(weight.shape), kept, times, chosen, gain)
