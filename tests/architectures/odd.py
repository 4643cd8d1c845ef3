"""Small networks that are written in unusual ways, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.architectures.plain import built, images, mlp, vectors


class SharedModules(nn.Module):
    """Use one layer under several names, several times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.again = self.first
        self.parts = nn.ModuleList([self.first, self.again, nn.Linear(12, 12)])
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        for part in self.parts:
            x = F.relu(part(x)) + x
        return self.out(self.again(x))


class Named(nn.Module):
    """Hold layers and a matrix in dictionaries."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(12, 16), "out": nn.Linear(16, 4)})
        self.matrices = nn.ParameterDict({"w": torch.randn(4, 4) / 2})

    def forward(self, x):
        return self.parts["out"](F.relu(self.parts["in"](x))) @ self.matrices["w"]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.coarse = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        fine = self.fine(x)
        return self.out(torch.cat([fine, self.up(self.coarse(fine))], dim=1))


class TiedAutoencoder(nn.Module):
    """Decode with the encoder's weight, transposed."""

    def __init__(self):
        super().__init__()
        self.encoder, self.middle = nn.Linear(20, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, x):
        code = torch.tanh(self.middle(torch.tanh(self.encoder(x))))
        return F.linear(code, self.encoder.weight.t(), self.bias)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, tokens, offsets):
        return self.body(self.embed(tokens, offsets))


class AnyArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, *args, scale=1.0, **_):
        return self.body(args[0]) * scale


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, *, x, wanted=None):
        return self.body(x) if wanted else x


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
        self.body, self.out = nn.TransformerDecoder(layer, 2), nn.Linear(16, 5)

    def forward(self, tgt, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.out(self.body(tgt, memory, tgt_mask=mask))


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.MultiheadAttention(16, 4, kdim=10, vdim=10, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, x, sources):
        return self.out(self.look(x, sources, sources)[0])


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, left, right):
        a, b = self.body(left), self.body(right)
        return F.cosine_similarity(a, b), (a - b).norm(dim=-1)


@dataclass
class Answer:
    logits: torch.Tensor
    rest: object = None


class Returning(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.body, self.made = mlp(), made

    def forward(self, x):
        return self.made(self.body(x))


class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 8).bfloat16()

    def forward(self, x):
        return self.last(F.relu(self.first(x)).bfloat16()).float()


class Counting(nn.Module):
    """Change its own attributes and buffers in every pass."""

    def __init__(self):
        super().__init__()
        self.body, self.passes, self.last = mlp(), 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        self.seen += 1
        self.last = self.body(x)
        return self.last


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(12, 24), nn.Linear(24, 3), nn.Linear(24, 3)

    def forward(self, x):
        z = self.first(x).relu()
        return self.left(z) if x.sum() > 0 else self.right(z)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(6, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.out = nn.Linear(24, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.read(packed)[0], batch_first=True)
        return self.out(y.sum(dim=1))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(12, 16), nn.GRUCell(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        first = second = None
        for t in range(x.shape[1]):
            first = self.first(x[:, t], first)
            second = self.second(first[0], second)
        return self.out(second)


class WithoutGradient(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.body, self.mode = mlp(), mode

    def forward(self, x):
        with self.mode():
            return self.body(x)


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=16))


class FromList(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(12, 8), nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, both):
        return self.out((self.left(both[0]) + self.right(both[1])).relu())


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 6, (3, 1), stride=(2, 1), padding="valid"), nn.PReLU(6),
        nn.Conv2d(6, 6, (1, 5), padding="same", dilation=(1, 2), padding_mode="circular"),
        nn.InstanceNorm2d(6, affine=True), nn.Hardswish(),
        nn.Conv2d(6, 12, 3, groups=3, bias=False), nn.ELU(),
        nn.ConvTranspose2d(12, 4, 3, stride=2, output_padding=1, groups=2), nn.Conv2d(4, 3, 1),
    )  # fmt: skip


def last_channels():
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return body.to(memory_format=torch.channels_last)


NETWORKS = {
    "shared-modules": built(SharedModules, vectors(12)),
    "dictionaries": built(Named, vectors(12)),
    "u-net": built(UNet, images(16)),
    "tied-autoencoder": built(TiedAutoencoder, vectors(20)),
    "embedding-bag": built(Bag, lambda n: {"tokens": torch.randint(0, 50, (n * 5,)), "offsets": torch.arange(0, n * 5, 5)}),
    "any-arguments": built(AnyArguments, vectors(12)),
    "by-name": built(ByName, lambda n: {"x": torch.randn(n, 12), "wanted": torch.tensor(True)}),
    "torch-decoder": built(Decoder, lambda n: (torch.randn(n, 6, 16), torch.randn(n, 5, 16))),
    "cross-attention": built(Cross, lambda n: (torch.randn(n, 6, 16), torch.randn(n, 5, 10))),
    "siamese": built(Siamese, lambda n: (torch.randn(n, 12), torch.randn(n, 12))),
    "dataclass": built(lambda: Returning(Answer), vectors(12)),
    "nested-output": built(lambda: Returning(lambda z: {"a": z, "none": None, "list": [3, (z.exp(),)]}), vectors(12)),
    "float16": built(lambda: mlp().half(), lambda n: torch.randn(n, 12).half()),
    "mixed-types": built(MixedTypes, vectors(12)),
    "channels-last": built(last_channels, lambda n: torch.randn(n, 3, 12, 12).to(memory_format=torch.channels_last)),
    "one-sample": built(mlp, lambda n: torch.randn(1, 12)),
    "convolutions": built(convolutions, lambda n: torch.randn(n, 2, 9, 14)),
    "counting": built(Counting, vectors(12)),
    "branching": built(Branching, vectors(12)),
    "packed": built(Packed, lambda n: {"x": torch.randn(n, 7, 6), "lengths": torch.randint(1, 8, (n,))}),
    "cells": built(Cells, lambda n: torch.randn(n, 7, 12)),
    "no-grad": built(lambda: WithoutGradient(torch.no_grad), vectors(12)),
    "inference": built(lambda: WithoutGradient(torch.inference_mode), vectors(12)),
    "fourier": built(Fourier, vectors(16)),
    "from-list": built(FromList, lambda n: [torch.randn(n, 12), torch.randn(n, 5)]),
}  # fmt: skip
