"""Really remove what pruning left empty: units without weights, and channels that nothing reads."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from lobs.deploy.shrink.cut import fit_to, keep_inputs, keep_normed, keep_units
from lobs.deploy.shrink.flow import Flow, Space, trace

__all__ = ["Shrinkage", "fit_to", "shrink"]


@dataclass(frozen=True)
class Shrinkage:
    """What `shrink` did: channels before and after by the layer that makes them, parameters, and why some had to stay."""

    channels: dict[str, tuple[int, int]]
    before: int
    after: int
    stayed: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{name}: {was:,} → {now:,} units"
            for name, (was, now) in self.channels.items()
            if now < was
        ]
        lines += [f"stayed: {why}" for why in self.stayed]
        share = self.after / max(1, self.before)
        return "\n".join([*lines, f"{self.before:,} → {self.after:,} parameters ({share:.1%})"])


def shrink(model: nn.Module, example: Tensor) -> tuple[nn.Module, Shrinkage]:
    """A smaller network with the same outputs, in eval mode, and a report.

    A channel goes where all that reads it finds it constant (the constant moves into the reader's
    bias), or gives it no weight. Residual sums lose the channels that are empty on both sides. What
    cannot go stays, with the reason in the
    report: a constant that a zero-padded convolution reads is not constant at its borders, and what
    goes through steps unknown here is not followed.

    Args:
        model: any network that `torch.fx` can trace; untouched.
        example: one input, of any batch size.
    """
    smaller = copy.deepcopy(model)
    was: dict[str, int] = {}
    while True:  # what goes may leave other units without weights
        sizes, stayed, removed = _pass(smaller, example)
        was, now = was or sizes, sizes
        if not removed:
            break
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, smaller))
    return smaller, Shrinkage(
        {name: (was[name], now[name]) for name in was}, before, after, tuple(stayed)
    )


def _pass(model: nn.Module, example: Tensor) -> tuple[dict[str, int], list[str], int]:
    """Cut once, in place; give the sizes there were, why some had to stay, and how many went."""
    flow = trace(model, example)
    sizes, stayed, removed = dict[str, int](), list[str](), 0
    plans = [(space, *_removable(flow, space, model)) for space in flow.spaces()]
    for space, gone, reasons in plans:
        sizes |= dict.fromkeys(space.producers, space.size)
        stayed += reasons
        going = gone[1:] if len(gone) == space.size else gone  # torch has no layers of nothing
        _cut(flow, space, model, going)
        removed += len(going)
    return sizes, stayed, removed


def _removable(flow: Flow, space: Space, model: nn.Module) -> tuple[Tensor, list[str]]:
    """Channels that can go from a space, and why some that are empty cannot."""
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
    """Input channels to which a layer gives no weight at all."""
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
