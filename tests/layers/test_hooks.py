"""Hooks: placed in one file, and all removed."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lobs
from lobs.layers import find_layers, hooks, watching

PLACING = re.compile(r"\bregister_\w*hook\b")


def test_only_one_file_places_hooks():
    root = Path(lobs.__file__).parent
    placing = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if PLACING.search(path.read_text(encoding="utf-8"))
    }
    assert placing == {"layers/hooks.py"}


def placed(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_every_hook_is_removed_when_one_cannot_be_placed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fast = torch.backends.mha.get_fastpath_enabled()

    def observe():
        for layer in find_layers(model):
            yield layer.on_input(lambda x: None)
        assert placed(model) == 2 and not torch.backends.mha.get_fastpath_enabled()
        raise RuntimeError("the third fails")

    with pytest.raises(RuntimeError, match="the third fails"), watching(observe()):
        pass
    assert placed(model) == 0 and torch.backends.mha.get_fastpath_enabled() == fast


def test_a_module_hook_sees_and_replaces():
    model = nn.Linear(2, 2)
    x, seen = torch.ones(1, 2), []
    before = hooks.before_forward(model, lambda _, args: seen.append(args[0]))
    named = hooks.before_forward(model, lambda _, a, k: seen.append(k), with_kwargs=True)
    after = hooks.after_forward(model, lambda _, __, z: z + 1)
    plain = nn.functional.linear(x, model.weight, model.bias)
    assert torch.equal(model(x), plain + 1) and seen == [x, {}]
    for handle in (before, named, after):
        handle.remove()
    assert placed(model) == 0 and torch.equal(model(x), plain)


@pytest.mark.parametrize("every", [True, False])
def test_an_optimiser_hook_runs_around_its_steps(every):
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    seen = []
    chosen = None if every else one
    handles = [
        hooks.before_step(chosen, lambda *_: seen.append("before")),
        hooks.after_step(chosen, lambda *_: seen.append("after")),
    ]
    one.step()
    other.step()
    for handle in handles:
        handle.remove()
    one.step()
    assert seen == ["before", "after"] * (2 if every else 1)


def test_a_gradient_hook_replaces_the_gradient():
    weight = nn.Parameter(torch.ones(3))
    handle = hooks.on_gradient(weight, lambda g: g * 0)
    (weight * 2).sum().backward()
    handle.remove()
    assert not weight.grad.any()


class Captures(nn.Module):
    """Places a hook with its first pass and remembers so, as transformers' networks do."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        if not getattr(self, "placed", False):
            self.fc.register_forward_hook(lambda _m, _x, out: out + 1.0)
            self.placed = True
        return self.head(self.fc(x).relu())


def test_hooks_that_a_network_places_in_a_pass_are_not_placed_again_in_the_next():
    model, batches = Captures().eval(), [torch.randn(8, 4) for _ in range(4)]
    wanted = copy.deepcopy(model)(batches[0])
    result = lobs.prune(model, batches, keep=1.0, progress=False)
    assert len(model.fc._forward_hooks) <= 1
    assert torch.equal(model(batches[0]), wanted)
    assert torch.equal(result.model(batches[0]), wanted)
