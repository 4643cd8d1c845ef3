"""Remove the units that pruning left without weights, and the channels that no layer reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lobs.calibration.batches import guarded
from lobs.calibration.channels import Sizes, first_samples
from lobs.deploy.shrink.config import fit_config
from lobs.deploy.shrink.cut import fit_to, keep_inputs, keep_normed, keep_units
from lobs.deploy.shrink.flow import Flow, Space, follow
from lobs.deploy.shrink.unread import Taken, take_unread
from lobs.errors import CalibrationError, ExportError, UnsupportedLayerError
from lobs.layers.discovery import all_layers

__all__ = ["Shrinkage", "fit_to", "shrink"]


@dataclass(frozen=True)
class Shrinkage:
    """Report what `shrink` did.

    Attributes:
        channels: units before and after, by layer.
        before: parameters of the network before.
        after: parameters of the smaller network.
        stayed: why some units without weights could not be removed.
        attributes: numbers that were changed in modules, by path and name.
        missing: why a Hugging Face configuration does not describe the smaller network; empty
            where it does.
    """

    channels: dict[str, tuple[int, int]]
    before: int
    after: int
    stayed: tuple[str, ...]
    attributes: Mapping[str, int] = field(default_factory=dict)
    missing: str = ""

    def __str__(self) -> str:
        lines = [
            f"{name}: {was:,} → {now:,} units"
            for name, (was, now) in self.channels.items()
            if now < was
        ]
        lines += [f"stayed: {why}" for why in self.stayed]
        lines += [self.missing] if self.missing else []
        share = self.after / max(1, self.before)
        return "\n".join([*lines, f"{self.before:,} → {self.after:,} parameters ({share:.1%})"])


def shrink(
    model: nn.Module, batches: Tensor | Mapping[str, Any] | Iterable[Any]
) -> tuple[nn.Module, Shrinkage]:
    """Return a smaller network with the same outputs in eval mode, and a report.

    Channels go where every layer that reads them gives them no weight: filters, hidden units, whole
    attention heads. The network is run once, so that every operation shows which channels stay or
    go together. The smaller network is run too, and must give the same output.

    Where `torch.fx` can trace the network, channels that are constant go as well. The constant
    moves into the reader's bias. A residual sum loses the channels that are empty on both sides.

    Other empty channels stay, and the report says why. A constant that a zero-padded convolution
    reads is not constant at the borders.

    A Hugging Face configuration is changed with the network, where it has fields for the sizes.

    Args:
        model: any network; left as it was found.
        batches: the batches that `prune` takes, of which the first is used, or one input.
    """
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"model is a {type(model).__name__}: give the network, such as result.model."
        )
    example = first_samples([_first(batches)])
    smaller = copy.deepcopy(model)
    was, sizes = _units(smaller), Sizes()
    while True:  # removed channels may leave other units without weights
        unread = take_unread(smaller, example)
        sizes |= unread.sizes
        constant = _take_constant(smaller, example, unread)
        if not unread.removed and not constant.removed:
            break
    stayed = (*unread.stayed, *constant.stayed)
    missing = fit_config(smaller, example, sizes)
    now = _units(smaller)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, smaller))
    channels = {name: (was[name], now[name]) for name in was}
    changed = _changed_attributes(model, smaller)
    return smaller, Shrinkage(channels, before, after, stayed, changed, missing)


def _changed_attributes(model: nn.Module, smaller: nn.Module) -> dict[str, int]:
    """Return the whole numbers that differ between the modules of two networks, by path."""
    theirs = dict(smaller.named_modules())
    return {
        f"{path}.{name}" if path else name: vars(theirs[path])[name]
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and vars(theirs[path]).get(name) != value
    }


def _units(model: nn.Module) -> dict[str, int]:
    """Return the number of units of every layer."""
    return {layer.name: layer.groups * layer.rows for layer in all_layers(model)}


def _take_constant(model: nn.Module, example: Any, unread: Taken) -> Taken:
    """Remove constant channels, where the network can be traced."""
    try:
        flow = follow(model, example)
    except UnsupportedLayerError:
        if not unread.families:
            raise
        return Taken(stayed=unread.kept)
    return _pass(flow, model)


def _first(batches: Tensor | Mapping[str, Any] | Iterable[Any]) -> Any:
    """Return the input of the first batch; a tensor or a mapping is one batch by itself."""
    if isinstance(batches, Tensor | Mapping):
        return batches
    batch = next(iter(guarded(batches, again=False)), None)
    if isinstance(batch, tuple | list):
        batch = batch[0] if batch else None
    if not isinstance(batch, Tensor | Mapping):
        raise CalibrationError(
            "shrink needs one batch to learn the shapes from, and the first is "
            f"{'missing' if batch is None else f'a {type(batch).__name__}'}. Give the batches "
            "that prune takes, or one input tensor."
        )
    return batch


def _pass(flow: Flow, model: nn.Module) -> Taken:
    """Remove channels once, in place."""
    stayed, removed = list[str](), 0
    plans = [(space, *_removable(flow, space, model)) for space in flow.spaces()]
    for space, gone, reasons in plans:
        stayed += reasons
        going = gone[1:] if len(gone) == space.size else gone  # torch has no layers without units
        _cut(flow, space, model, going)
        removed += len(going)
    return Taken(removed, tuple(stayed))


def _removable(flow: Flow, space: Space, model: nn.Module) -> tuple[Tensor, list[str]]:
    """Return the channels that can be removed from a space, and why other empty ones cannot."""
    none = torch.empty(0, dtype=torch.int64)
    nodes = [node for node, own in flow.space.items() if own is space]
    empty = torch.stack([~flow.constant[node].isnan() for node in nodes]).any(dim=0)
    who = " + ".join(space.producers) or "the input"
    if space.fixed or not space.producers:
        unread = (
            _unread(flow, space, model)
            if space.readers and not space.fixed
            else torch.zeros_like(empty)
        )
        count = int((empty | unread).sum())
        return none, [
            f"{count} empty units of {who}: {space.fixed or 'nothing makes them'}"
        ] if count else []
    can_go = torch.ones(space.size, dtype=torch.bool)
    reasons = []
    wished = empty.clone()
    for name, node in space.readers:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear | nn.Conv2d)
        constant, silent = flow.constant[node], _silent(module, flow.features[node])
        wished |= silent
        bordered = ~constant.isnan() & (constant != 0) & ~silent & _pads_zeros(module)
        can_go &= (~constant.isnan() & ~bordered) | silent
        if bool(bordered.any()):
            reasons.append(
                f"{int(bordered.sum())} units of {who}: constant but not zero, and '{name}' pads "
                "with zeros"
            )
    left = int((wished & ~can_go).sum())
    if left and not reasons:
        reasons.append(f"{left} units of {who}: not empty everywhere they are added or read")
    return can_go.nonzero().squeeze(1), reasons


def _unread(flow: Flow, space: Space, model: nn.Module) -> Tensor:
    silent = [
        _silent(model.get_submodule(name), flow.features[node]) for name, node in space.readers
    ]
    return torch.stack(silent).all(dim=0)


def _silent(module: nn.Module, features: int) -> Tensor:
    """Return a mask of the input channels to which a layer gives no weight at all."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    columns = (weight.detach() != 0).transpose(0, 1).flatten(1).any(dim=1)
    return ~columns.view(-1, features).any(dim=1)


def _pads_zeros(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.padding_mode != "zeros":
        return False
    if module.padding == "same":
        return any(k > 1 for k in module.kernel_size)
    return module.padding not in ("valid", (0, 0))


def _cut(flow: Flow, space: Space, model: nn.Module, gone: Tensor) -> None:
    if not len(gone):
        return
    kept = torch.ones(space.size, dtype=torch.bool)
    kept[gone] = False
    stay = kept.nonzero().squeeze(1)
    for name in space.producers:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear | nn.Conv2d)
        keep_units(module, stay)
    for name in space.norms:
        norm = model.get_submodule(name)
        assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        each = norm.num_features // space.size
        keep_normed(norm, (stay.unsqueeze(1) * each + torch.arange(each)).flatten())
    for name, node in space.readers:
        _cut_reader(flow, model, name, node, stay)


def _cut_reader(flow: Flow, model: nn.Module, name: str, node: fx.Node, stay: Tensor) -> None:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear | nn.Conv2d)
    keep_inputs(module, stay, flow.features[node], flow.constant[node])
