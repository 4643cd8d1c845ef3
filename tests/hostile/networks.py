"""Networks and data that are odd, broken or both."""

from __future__ import annotations

import torch
from torch import nn

NAN, INF = float("nan"), float("inf")
TYPES = (torch.bfloat16, torch.float16, torch.float64)


class Returning(nn.Module):
    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


class Raising(nn.Module):
    """Raises on its n-th call."""

    def __init__(self, inner, after):
        super().__init__()
        self.inner, self.after, self.calls = inner, after, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > self.after:
            raise RuntimeError("the network gave up")
        return self.inner(x)


class InPlace(nn.Module):
    """Spoils its input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mul_(2).add_(1))


class Unreached(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.spare = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


class Keyed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, values, scale=1.0):
        return self.inner(values * scale)


class Uncopyable(Returning):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle '_thread.lock' object")


def mlp():
    return nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
    )


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 1, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def narrow():
    return nn.Sequential(nn.Linear(6, 1), nn.ReLU(), nn.Linear(1, 3))


def residual():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return x + self.b(torch.relu(self.a(x)))

    return Residual()


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return net


def attention():
    return nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
    )


BODIES = [mlp, mlp, convnet, narrow, residual, tied, attention, lambda: nn.Linear(6, 3), nn.ReLU]


def first(net):
    return next(net.parameters(), torch.zeros(1))


def filled(value):
    def change(net):
        with torch.no_grad():
            first(net).view(-1)[0] = value
        return net

    return change


def scaled(factor):
    def change(net):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(factor)
        return net

    return change


def hooked(net):
    net.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    net.register_forward_hook(lambda m, args, out: out)
    for module in net.children():
        module.register_forward_hook(
            lambda m, args, out: out * 1.0 if isinstance(out, torch.Tensor) else out
        )
    return net


def strided(net):
    for module in net.modules():
        if isinstance(module, nn.Linear) and not isinstance(
            module.weight, nn.parameter.UninitializedParameter
        ):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    return net


def dying(net):
    """No activation survives the first layer."""
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.fill_(-1e3)
                break
    return net


CHANGES = [
    *[lambda net: net] * 6,
    lambda net: net.train(),
    lambda net: net.requires_grad_(False),
    nn.DataParallel,
    hooked, strided, dying, InPlace, Unreached,
    *(filled(v) for v in (NAN, INF, 1e30, 1e-30)),
    *(scaled(s) for s in (0.0, 1e18, 1e-30)),
    *(lambda net, kind=kind: net.to(kind) for kind in TYPES),
    lambda net: Returning(net, lambda y: (y, y)),
    lambda net: Returning(net, lambda y: {"logits": y}),
    lambda net: Returning(net, lambda y: None),
    lambda net: Returning(net, lambda y: y.argmax(dim=-1)),
    lambda net: Returning(net, lambda y: y * NAN),
    *(lambda net, n=n: Raising(net, n) for n in (0, 1, 3, 9)),
    lambda net: Uncopyable(net, lambda y: y),
    lambda net: net.to("meta"),
    Keyed,
    lambda net: nn.Sequential(net, nn.LazyLinear(2)),
]  # fmt: skip


def batches_of(rng, generator, kind, dtype):
    """Three batches, with one fault, and perhaps in an odd container."""
    sizes = rng.choice([(8, 8, 8), (1, 1, 1), (16, 3, 1), (40,)])
    data = [torch.randn(n, 6, generator=generator).to(dtype) for n in sizes]
    last = data[-1]
    match kind:
        case "nan" | "inf":
            last.view(-1)[0] = float(kind)
        case "huge":
            data = [x * 1e30 for x in data]
        case "tiny":
            data = [x * 1e-30 for x in data]
        case "mixed":
            data = [x * torch.tensor([1e-25, 1, 1e25, 1, 0, 1]).to(dtype) for x in data]
        case "zero":
            data = [x * 0 for x in data]
        case "same":
            data = [torch.ones_like(x) for x in data]
        case "wrong width":
            data.append(torch.randn(2, 7))
        case "integers":
            data = [x.long() for x in data]
        case "scalars":
            data = [torch.tensor(1.0)]
        case "no rows":
            data = [x[:0] for x in data]
        case "strings":
            data = ["x", "y"]
        case "nothing":
            data = []
        case "nones":
            data = [None]
    return data


KINDS = ["good"] * 10 + [
    "nan", "inf", "huge", "tiny", "mixed", "zero", "same", "wrong width", "integers", "scalars",
    "no rows", "strings", "nothing", "nones",
]  # fmt: skip


class Breaking:
    """Raises after some batches, in some pass."""

    def __init__(self, data, passes):
        self.data, self.passes = data, passes

    def __iter__(self):
        self.passes -= 1
        yield self.data[0]
        if self.passes < 0:
            raise OSError("the disk is gone")
        yield from self.data[1:]


CONTAINERS = [
    *[lambda data: data] * 8,
    iter,
    tuple,
    lambda data: [(x, torch.zeros(1)) for x in data],
    lambda data: [[x] for x in data],
    lambda data: [{"values": x} for x in data],
    lambda data: [()] if not data else [((x,),) for x in data],
    lambda data: torch.utils.data.DataLoader(data, batch_size=None),
    lambda data: data[0] if data else None,
    lambda data: None,
    *(lambda data, n=n: Breaking(data, n) if data else data for n in (0, 1, 2, 4)),
]
