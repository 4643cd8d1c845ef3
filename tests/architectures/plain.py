"""Small random networks of plain torch, by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def vectors(width):
    return lambda n: torch.randn(n, width)


def images(size, channels=3):
    return lambda n: torch.randn(n, channels, size, size)


def built(make, batch):
    """Return a function that makes a network from a seed, and one that makes batches."""

    def named():
        torch.manual_seed(0)
        return make().eval(), batch

    return named


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Embedded(nn.Module):
    """Embed words, run a body, and read out with the embedding's own weight if tied."""

    def __init__(self, body, width=16, words=40, *, tied=False):
        super().__init__()
        self.embed, self.body = nn.Embedding(words, width), body
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.body(self.embed(ids))
        return self.head(x[0] if isinstance(x, tuple) else x)


class Functional(nn.Module):
    """Use its weights through functions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(24, 12) / 4)
        self.kernel = nn.Parameter(torch.randn(3, 3, 3) / 3)
        self.bias = nn.Parameter(torch.randn(24) / 4)
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        z = F.relu(F.linear(x, self.first, self.bias))
        z = F.conv1d(z.view(-1, 3, 8), self.kernel, padding=1)
        return self.last(F.relu(z.flatten(1)))


class Noisy(nn.Module):
    """Add noise to what it passes on, also in eval mode."""

    def __init__(self, size=1.0):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x + self.size * torch.randn_like(x)


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + spread.exp() * torch.randn_like(mean)), mean


class Cached(nn.Module):
    """Keep a tensor that has a history, as networks with attention biases do."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.places = {}
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        if "cpu" not in self.places:
            self.places["cpu"] = self.bias * 2
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT / 4 + self.places["cpu"]).softmax(dim=-1) @ v)


class Experts(nn.Module):
    """A router and experts in a module list."""

    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
            for _ in range(experts)
        )

    def forward(self, x):
        share, best = self.router(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            out[chosen] = expert(x[chosen]) * share[chosen].unsqueeze(-1)
        return out


class StackedExperts(nn.Module):
    """All experts in two parameters, with every token in one of them."""

    def __init__(self, width=16, hidden=24, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 5)

    def forward(self, x):
        share, best = self.router(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for number in range(len(self.up)):
            chosen = best == number
            hidden = F.gelu(x[chosen] @ self.up[number])
            out[chosen] = hidden @ self.down[number] * share[chosen].unsqueeze(-1)
        return out


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 24), nn.Linear(10, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, left, right):
        return self.out(F.relu(self.left(left) * self.right(right)))


class FromDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, batch):
        return {"answer": self.body(batch["features"])}


class Spare(nn.Module):
    """Hold a layer that no forward pass reaches."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = mlp(), nn.Linear(12, 12)

    def forward(self, x):
        return self.body(x)


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.rnn = kind(12, 16, batch_first=True, **settings)
        width = 32 if settings.get("bidirectional") else 16
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Standardised(nn.Conv2d):
    """Standardise the weight of every output channel before it is used."""

    def forward(self, x):
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        spread = self.weight.std(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / spread, self.bias)


class Padded(nn.Conv2d):
    """Pad by itself, as "same" convolutions of TensorFlow do."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 2, 1, 2)), self.weight, self.bias, self.stride)


class Cast(nn.Linear):
    """Compute what `nn.Linear` computes, in a forward pass of its own."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Dropping(nn.Module):
    """Drop elements in eval mode too, as Monte Carlo dropout does."""

    def forward(self, x):
        return F.relu(F.dropout(x, 0.2, training=True))


class Listed(nn.Module):
    """Take a list of images of any size, as detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.out = nn.Linear(8, 4)

    def forward(self, images):
        return self.out(torch.stack([self.body(x).mean(dim=(1, 2)) for x in images]))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.join, self.out = nn.Bilinear(8, 6, 24), nn.Linear(24, 4)

    def forward(self, a, b):
        return self.out(F.relu(self.join(a, b)))


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).add_(1).relu_()


class Twice(nn.Module):
    """Run one layer two times."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x):
        x = F.relu(self.inner(F.relu(self.first(x))))
        return self.last(F.relu(self.inner(x)))


def mlp(width=12):
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 5))  # fmt: skip


def conv(*channels, kernel=3, groups=1, kind=nn.Conv2d):
    parts = []
    for a, b in zip(channels, channels[1:], strict=False):
        parts += [kind(a, b, kernel, padding=kernel // 2, groups=groups), nn.BatchNorm2d(b), nn.ReLU()]  # fmt: skip
    return nn.Sequential(*parts)


def classifier(body, channels, classes=5):
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def separable(channels=16):
    return nn.Sequential(
        conv(3, channels),
        *[
            nn.Sequential(
                conv(channels, channels, groups=channels), conv(channels, channels, kernel=1)
            )
            for _ in range(2)
        ],  # fmt: skip
    )


def normed(wrap):
    return nn.Sequential(wrap(nn.Linear(12, 32)), nn.ReLU(), wrap(nn.Linear(32, 5)))


def scripted():
    return nn.Sequential(nn.Linear(12, 24), torch.jit.script(nn.Sequential(nn.Linear(24, 24), nn.ReLU())), nn.Linear(24, 5))  # fmt: skip


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


tokens = lambda n: torch.randint(0, 40, (n, 10))
steps = lambda n: torch.randn(n, 8, 12)
NETWORKS = {
    "mlp": built(mlp, vectors(12)),
    "one-wide-row": built(lambda: nn.Linear(256, 1), vectors(256)),
    "residual": built(lambda: nn.Sequential(nn.Linear(12, 24), *[Residual(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))) for _ in range(3)], nn.Linear(24, 4)), vectors(12)),
    "conv": built(lambda: classifier(conv(3, 8, 16), 16), images(12)),
    "separable": built(lambda: classifier(separable(), 16), images(12)),
    "grouped": built(lambda: classifier(nn.Sequential(conv(3, 16), conv(16, 16, groups=4)), 16), images(12)),
    "conv1d": built(lambda: nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(88, 4)), lambda n: torch.randn(n, 3, 28)),
    "conv3d": built(lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)), lambda n: torch.randn(n, 2, 5, 5, 5)),
    "decoder": built(lambda: nn.Sequential(nn.Linear(10, 72), nn.Unflatten(1, (8, 3, 3)), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)), vectors(10)),
    "encoder": built(lambda: Embedded(encoder()), tokens),
    "norm-first": built(lambda: Embedded(encoder(norm_first=True)), tokens),
    "tied": built(lambda: Embedded(encoder(), tied=True), tokens),
    "lstm": built(lambda: Recurrent(nn.LSTM), steps),
    "gru": built(lambda: Recurrent(nn.GRU, num_layers=2), steps),
    "bidirectional": built(lambda: Recurrent(nn.LSTM, bidirectional=True), steps),
    "functional": built(Functional, vectors(12)),
    "noise": built(lambda: nn.Sequential(nn.Linear(20, 32), Noisy(), nn.ReLU(), nn.Linear(32, 24), Noisy(), nn.ReLU(), nn.Linear(24, 8)), vectors(20)),
    "variational": built(Variational, vectors(20)),
    "dropout-on": built(lambda: nn.Sequential(nn.Linear(20, 32), Dropping(), nn.Linear(32, 24), Dropping(), nn.Linear(24, 8)), vectors(20)),
    "cached": built(lambda: nn.Sequential(Cached(), Cached()), lambda n: torch.randn(n, 6, 12)),
    "experts": built(lambda: nn.Sequential(nn.Linear(12, 16), Experts(), nn.Linear(16, 4)), vectors(12)),
    "stacked-experts": built(lambda: nn.Sequential(nn.Linear(12, 16), StackedExperts(), nn.Linear(16, 4)), vectors(12)),
    "two-inputs": built(TwoInputs, lambda n: (torch.randn(n, 8), torch.randn(n, 10))),
    "labelled": built(mlp, lambda n: (torch.randn(n, 12), torch.randint(0, 5, (n,)))),
    "dict-with-labels": built(TwoInputs, lambda n: {"left": torch.randn(n, 8), "right": torch.randn(n, 10), "labels": torch.randint(0, 4, (n,))}),
    "from-dict": built(FromDict, lambda n: {"features": torch.randn(n, 8), "labels": torch.randint(0, 4, (n,))}),
    "list-of-images": built(Listed, lambda n: [torch.randn(3, 8 + k % 3, 8) for k in range(n)]),
    "spare": built(Spare, vectors(12)),
    "standardised": built(lambda: classifier(nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), Standardised(8, 8, 3)), 8), images(12)),
    "padded": built(lambda: classifier(nn.Sequential(Padded(3, 8, 4), nn.ReLU(), Padded(8, 8, 4)), 8), images(12)),
    "own-forward": built(lambda: nn.Sequential(Cast(12, 24), nn.ReLU(), Cast(24, 5)), vectors(12)),
    "weight-norm": built(lambda: normed(nn.utils.parametrizations.weight_norm), vectors(12)),
    "spectral-norm": built(lambda: normed(nn.utils.parametrizations.spectral_norm), vectors(12)),
    "old-weight-norm": built(lambda: normed(nn.utils.weight_norm), vectors(12)),
    "old-spectral-norm": built(lambda: normed(nn.utils.spectral_norm), vectors(12)),
    "scripted": built(scripted, vectors(12)),
    "bilinear": built(Bilinear, lambda n: (torch.randn(n, 8), torch.randn(n, 6))),
    "in-place": built(lambda: nn.Sequential(nn.Linear(12, 24), InPlace(), nn.Linear(24, 5)), vectors(12)),
    "shared-twice": built(Twice, vectors(12)),
    "half": built(lambda: mlp().to(torch.bfloat16), lambda n: torch.randn(n, 12).to(torch.bfloat16)),
    "double": built(lambda: mlp().double(), lambda n: torch.randn(n, 12).double()),
}  # fmt: skip
