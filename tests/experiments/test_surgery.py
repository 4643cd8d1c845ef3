from __future__ import annotations

import pytest
import torch
from experiments.dong2017.surgery import Surgery, operate, redraw, threshold_c
from torch import nn

from lobs import LobsError
from lobs.training import Shuffled, sgd


def task(n=240):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def wrong(model):
    x, y = task()
    was = model.training
    model.eval()
    with torch.no_grad():
        error = 100 * float((model(x).argmax(1) != y).float().mean())
    model.train(was)
    return error


def zeros_held(model, masks):
    state = model.state_dict()
    return all(bool((state[name][~mask] == 0).all()) for name, mask in masks.items())


def equal(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def test_masks_are_redrawn_as_the_two_thresholds_say():
    w = torch.tensor([0.0, 0.39, -0.4, 0.59, -0.6, 2.0])
    for mask in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        kept = redraw(w, mask, 0.4, 0.6)
        assert kept.tolist() == [False, False, bool(mask[2]), bool(mask[3]), True, True]


def test_thresholds_are_mean_plus_c_deviations():
    w = torch.randn(50, 40)
    a, b = Surgery(0.7, margin=0.1).thresholds("x", w)
    middle = float(w.abs().mean() + 0.7 * w.abs().std())
    assert a == pytest.approx(0.9 * middle) and b == pytest.approx(1.1 * middle)
    assert Surgery(-100.0).thresholds("x", w) == (0.0, 0.0)


@pytest.mark.parametrize("kept", [0.01, 0.1, 0.5, 0.99])
def test_c_for_a_kept_fraction_gives_that_fraction(kept):
    w = torch.randn(50, 40)
    middle = Surgery(threshold_c(w, kept), margin=0.0).thresholds("x", w)[0]
    assert float((w.abs() >= middle).float().mean()) == pytest.approx(kept, abs=2e-3)


def test_the_probability_of_redrawing_falls():
    rule = Surgery(0.0, gamma=0.1, power=1.0)
    values = [rule.probability(t) for t in (0, 10, 100)]
    assert values == pytest.approx([1.0, 0.5, 1 / 11])


def test_surgery_ends_with_masked_weights_that_work():
    dense = net()
    done = operate(
        dense,
        Shuffled(*task(), 24),
        Surgery(0.5),
        iterations=300,
        optimizer=sgd(0.1),
        evaluate=wrong,
        every=50,
    )
    assert 0 < done.kept_fraction < 0.7 and zeros_held(done.model, done.masks)
    assert (
        wrong(done.model) == done.history[-1][1] < 40 and done.history[-1][2] == done.kept_fraction
    )
    again = operate(
        dense,
        Shuffled(*task(), 24),
        Surgery(0.5),
        iterations=300,
        optimizer=sgd(0.1),
    )
    assert equal(done.model, again.model)


def test_a_cut_weight_goes_on_learning_and_is_spliced_back():
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.1]]))
    x = torch.randn(64, 2)
    data = [(x, x @ torch.tensor([[1.0], [1.0]]))]
    rule = Surgery(0.0, gamma=0.0, freeze_after=1.0)  # thresholds 0.9 and 1.1 times the mean, 0.55
    loss = nn.functional.mse_loss
    short = operate(
        layer,
        data,
        rule,
        iterations=1,
        loss=loss,
        optimizer=sgd(0.05, momentum=0.0),
    )
    assert short.masks["weight"].tolist() == [[True, False]]
    long = operate(
        layer,
        data,
        rule,
        iterations=100,
        loss=loss,
        optimizer=sgd(0.05, momentum=0.0),
    )
    assert long.masks["weight"].tolist() == [[True, True]]
    torch.testing.assert_close(long.model.weight, torch.ones(1, 2), atol=0.05, rtol=0)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up = nn.ConvTranspose1d(6, 4, 3, groups=2)

    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.up(self.attention(x, x, x, need_weights=False)[0].mT).mean(dim=2)


def test_masks_bear_the_names_of_parameters_whatever_the_layer():
    torch.manual_seed(0)
    done = operate(Attending(), [task()], Surgery(0.5, gamma=0.0), iterations=6)
    assert set(done.masks) == {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight"}
    assert 0 < done.kept_fraction < 1 and zeros_held(done.model, done.masks)
    gone = sum(int((done.model.state_dict()[name] == 0).sum()) for name in done.masks)
    assert gone == sum(int((~m).sum()) for m in done.masks.values())


def test_masks_stay_in_the_last_part():
    rule = Surgery(0.5, freeze_after=0.0)
    done = operate(net(), Shuffled(*task(), 24), rule, iterations=20)
    assert done.kept_fraction == 1.0


def test_mistakes_are_named():
    with pytest.raises(LobsError, match="layer '3' has no c"):
        operate(net(), [task()], Surgery({"0": 0.1}), iterations=1)
    with pytest.raises(LobsError, match="no batches"):
        operate(net(), [], Surgery(0.1), iterations=1)
    with pytest.raises(LobsError, match="data is a generator"):
        operate(net(), iter([task()]), Surgery(0.1), iterations=1)
