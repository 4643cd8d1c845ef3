"""Channels that stay or go together, seen in one forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lobs.calibration.channels import Cut, Removal, observe


class Attention(nn.Module):
    """Grouped-query attention whose code divides by attributes."""

    def __init__(self, width=16, heads=4, kv_heads=2, size=4):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, size
        self.q = nn.Linear(width, heads * size)
        self.k = nn.Linear(width, kv_heads * size)
        self.v = nn.Linear(width, kv_heads * size)
        self.o = nn.Linear(heads * size, width)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (
            p(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
            for p in (self.k, self.v)
        )
        k, v = (z.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(3 * q, k, v)
        return x + self.o(y.transpose(1, 2).reshape(b, t, -1))


class Gated(nn.Module):
    def __init__(self, width=16, hidden=12):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Fused(nn.Module):
    """One projection for query, key and value; gate and value of the MLP in one too."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.n_head, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 20), nn.Linear(10, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = ((4 * q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)
        x = x + self.out(y)
        a, g = self.wide(x).chunk(2, -1)
        return x + self.narrow(a * g.sigmoid())


class Mobile(nn.Module):
    """An inverted bottleneck with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.expand, self.n1 = nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12)
        self.depth, self.n2 = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.project = nn.Conv2d(12, 5, 1)

    def forward(self, x):
        x = self.n2(self.depth(F.hardswish(self.n1(self.expand(x)))))
        s = self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu())
        return self.project(x * s.sigmoid())


class Dense(nn.Module):
    """Concatenation, a grouped convolution, and maps flattened into a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(14)
        self.inner, self.grouped = nn.Conv2d(14, 8, 1), nn.Conv2d(8, 8, 3, groups=4)
        self.last = nn.Linear(8 * 4, 3)

    def forward(self, x):
        a = self.a(x).relu()
        y = torch.cat([a, self.b(a)], 1)
        return self.last(self.grouped(self.inner(self.norm(y)).relu()).flatten(1))


NETS = {
    "attention": (Attention, (5, 16), [2]),
    "gated": (Gated, (5, 16), [12]),
    "fused": (Fused, (5, 12), [3, 10]),
    "mobile": (Mobile, (3, 6, 6), [4, 12]),
    "dense": (Dense, (3, 4, 4), [4, 6, 8]),
}


def made(kind):
    build, shape, sizes = NETS[kind]
    torch.manual_seed(0)
    return build().eval(), torch.randn(3, *shape), sizes


def silenced(model, cuts):
    """Return a copy in which nothing reads the channels that are to go."""
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for cut in cuts:
            for name, dim in cut.family.readers:
                places = cut.family.slots[name, dim][cut.gone].flatten()
                masked.get_parameter(name).index_fill_(dim, places, 0)
    return masked


@pytest.mark.parametrize("kind", NETS)
def test_what_goes_together_can_be_cut_and_the_output_stays(kind):
    model, x, sizes = made(kind)
    channels = observe(model, x)
    assert sorted(len(f) for f in channels.families) == sizes
    cuts = [Cut(f, torch.arange(0, len(f), 2)) for f in channels.families]
    masked = silenced(model, cuts)
    assert all(bool(f.unread[::2].all()) for f in observe(masked, x).families)
    smaller = copy.deepcopy(masked)
    assert Removal(smaller, x, channels.families).remove(cuts) == []
    other = torch.randn_like(x)
    torch.testing.assert_close(smaller(other), masked(other), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())


def test_heads_are_counted_where_the_code_counts_them():
    model, x, _ = made("attention")
    (family,) = observe(model, x).families
    assert {name: tuple(i.shape) for (name, _), i in family.slots.items()} == {
        "q.weight": (2, 8), "q.bias": (2, 8), "k.weight": (2, 4), "k.bias": (2, 4),
        "v.weight": (2, 4), "v.bias": (2, 4), "o.weight": (2, 8),
    }  # fmt: skip
    cut = Cut(family, torch.tensor([1]))
    smaller = silenced(model, [cut])
    assert not Removal(smaller, x, [family]).remove([cut])
    assert (smaller.num_heads, smaller.num_kv_heads, smaller.head_dim) == (2, 1, 4)


class HardCoded(Attention):
    """Divides into four heads whatever there is."""

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, 4, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).reshape(b, t, -1))


def test_a_cut_that_would_divide_heads_in_another_way_is_undone():
    torch.manual_seed(0)
    model, x = HardCoded(kv_heads=4, size=6, heads=4).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        for layer in (model.q, model.k):  # equal scores: any division gives the same output
            layer.weight.zero_()
            layer.bias.zero_()
    (family,) = observe(model, x).families
    cut = Cut(family, torch.tensor([0, 2]))
    masked = silenced(model, [cut])
    before = {k: v.clone() for k, v in masked.state_dict().items()}
    ((_, why),) = Removal(masked, x, [family]).remove([cut])
    assert "divide" in why and vars(masked)["num_heads"] == 4
    assert all(torch.equal(before[k], v) for k, v in masked.state_dict().items())


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda h: F.layer_norm(h, (6,)), "layer norm"),
        (lambda h: h.softmax(-1), "softmax"),
        (lambda h: h / h.norm(dim=-1, keepdim=True), "norm"),
        (lambda h: h + torch.arange(6.0), "add"),
        (lambda h: h.sort().values, "sort"),
        (lambda h: torch.fft.rfft(h).abs()[..., :3].repeat(1, 2), "_fft_r2c"),
        (lambda h: h if float(h.sum()) > 1e9 else 2 * h, "sum"),
    ],
)
def test_channels_stay_where_a_step_depends_on_all_of_them(step, why):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(step(self.first(x)))

    channels = observe(Net(), torch.randn(3, 4))
    assert not channels.families
    assert why in channels.stays["first.weight", 0]


def test_the_network_is_left_as_it_was():
    model, x, _ = made("mobile")
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [dict(vars(m)) for m in model.modules()]
    observe(model, x)
    assert model.training and [dict(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_channels_that_are_written_into_other_memory_stay():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(8, 2)

        def forward(self, x):
            wide = torch.zeros(len(x), 8)
            wide[:, :6] = self.first(x)
            return self.last(wide)

    channels = observe(Net(), torch.randn(3, 4))
    assert not channels.families and channels.stays["first.weight", 0] == "copy_"


class Strict(nn.Module):
    """Three branches side by side; the code insists on the size of the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 8)
        self.last = nn.Linear(20, 3)

    def forward(self, x):
        a = self.a(x)
        if a.shape[-1] != 6:
            raise ValueError("six are needed")
        return self.last(torch.cat([a, self.b(x), self.c(x)], -1).tanh())


def test_families_that_share_a_reader_are_cut_one_after_another():
    torch.manual_seed(0)
    model, x = Strict(), torch.randn(5, 4)
    channels = observe(model, x)
    cuts = [Cut(f, torch.tensor([0, 2])) for f in channels.families]
    masked = silenced(model, cuts)
    smaller = copy.deepcopy(masked)
    ((failed, why),) = Removal(smaller, x, channels.families).remove(cuts)
    assert "six are needed" in why and ("a.weight", 0) in failed.family.slots
    assert (smaller.b.out_features, smaller.c.out_features) == (4, 6)
    other = torch.randn(7, 4)
    torch.testing.assert_close(smaller(other), masked(other))
