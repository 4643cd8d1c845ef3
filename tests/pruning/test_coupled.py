"""Structured pruning of units that several layers share: hidden units, heads, channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.errors import LobsError
from tests.calibration.test_channels import NETS, Fused, Gated, made


def run(model, batches, target, **options):
    options = {"refit": "layers", "progress": False} | options
    return lobs.prune(model, batches, target, **options)


@pytest.mark.parametrize("kind", NETS)
def test_a_share_of_units_and_heads_leaves_the_network_with_the_same_output(kind):
    model, x, sizes = made(kind)
    shape = x.shape[1:]
    result = run(model, [torch.randn(20, *shape) for _ in range(3)], lobs.Structured(0.4))
    smaller, report = lobs.shrink(result.model, [x])
    assert not report.stayed and report.after < 0.85 * report.before
    other = torch.randn(4, *shape)
    torch.testing.assert_close(smaller(other), result.model(other), rtol=1e-5, atol=1e-5)
    gone = sum(was - now for was, now in report.channels.values())
    assert gone >= sum(int(0.4 * n + 0.5) for n in sizes)


def test_the_exact_share_of_hidden_units_goes_from_all_layers_that_hold_them():
    torch.manual_seed(0)
    result = run(Gated(), list(torch.randn(3, 40, 16)), lobs.Structured(0.25))
    gate, up, down = (result.masks[f"{name}.weight"] for name in ("gate", "up", "down"))
    dropped = ~gate.any(dim=1)
    assert int(dropped.sum()) == 3
    assert torch.equal(dropped, ~up.any(dim=1)) and torch.equal(dropped, ~down.any(dim=0))
    assert gate[~dropped].all() and up[~dropped].all() and down[:, ~dropped].all()


def test_units_go_that_the_next_layer_can_replace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 2 * model[0].weight[1], 2 * model[0].bias[1]
        model[2].weight[:, 4] *= 1e-4  # a large unit that hardly anything reads
        model[0].weight[4] *= 3
    batches = list(torch.randn(4, 50, 5))
    result = run(model, batches, lobs.Structured(1 / 3))
    dropped = (~result.masks["0.weight"].any(dim=1)).nonzero().flatten().tolist()
    assert 4 in dropped and (1 in dropped) != (3 in dropped)
    x = torch.randn(30, 5)
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-2, atol=1e-2)


def test_the_reader_makes_up_for_lost_units():
    torch.manual_seed(0)
    model, x = Gated(hidden=24), torch.randn(6, 60, 3) @ torch.randn(3, 16)
    result = run(model, list(x[:5]), lobs.Structured(0.3))
    plain = run(model, list(x[:5]), lobs.Structured(0.3), solver="magnitude")
    with torch.no_grad():
        dense, ours, theirs = (net(x[5]) for net in (model, result.model, plain.model))
    assert float((ours - dense).norm()) < 0.9 * float((theirs - dense).norm())


def test_units_that_could_not_leave_stay():
    torch.manual_seed(0)
    model = Fused()
    result = run(model, list(torch.randn(3, 20, 4, 12)), lobs.Structured(0.4))
    rows = {name: int((~m.any(dim=1)).sum()) for name, m in result.masks.items() if m.dim() == 2}
    assert rows == {"qkv.weight": 12, "wide.weight": 8, "out.weight": 0, "narrow.weight": 0}


def test_a_mapping_couples_layers_only_where_it_names_them_all():
    torch.manual_seed(0)
    model, batches = Gated(), list(torch.randn(3, 40, 16))
    every = run(model, batches, lobs.Structured({"*": 0.25}))
    assert not every.masks["down.weight"].all()
    alone = run(model, batches, lobs.Structured({"gate": 0.25}))
    assert torch.equal(alone.model.down.weight, model.down.weight)
    assert int((~alone.masks["gate.weight"].any(dim=1)).sum()) == 3


def test_layers_that_are_skipped_keep_their_columns():
    torch.manual_seed(0)
    model = Fused()
    result = run(model, list(torch.randn(3, 20, 4, 12)), lobs.Structured(0.4), skip="narrow")
    assert torch.equal(result.model.narrow.weight, model.narrow.weight)
    assert torch.equal(result.model.wide.weight, model.wide.weight)
    assert not result.masks["out.weight"].all()


def test_layers_that_share_units_need_one_fraction():
    wish = lobs.Structured({"up": 0.5, "gate": 0.25, "down": 0.125})
    with pytest.raises(LobsError, match=r"'gate' and 'up' lose their units|'up' and 'gate' lose"):
        run(Gated(), list(torch.randn(3, 40, 16)), wish)
