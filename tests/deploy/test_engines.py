"""Engines give what dense torch gives; what they do not take, dense torch computes."""

from __future__ import annotations

import copy
import itertools
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from lobs.deploy.accelerate.engines import ChainEngine, ConvEngine
from lobs.deploy.accelerate.modules import FastSequential, fast_layer, same_as
from lobs.deploy.accelerate.torch_engines import BsrEngine, CsrEngine, ShrunkEngine


def sparse(module, keep=0.1):
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.masked_fill_(torch.rand_like(p) > keep, 0)
    return module.eval().requires_grad_(False)


def assert_close(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (), (3,), (64,), (130,), (2, 5), (2, 70)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda m, x: ChainEngine([m], [False], x), lambda m, x: CsrEngine([m], x)],
    ids=["chain", "csr"],
)
def test_linear_for_every_leading_shape(shape, bias, make):
    layer, x = sparse(nn.Linear(200, 37, bias=bias), keep=0.3), torch.randn(*shape, 200)
    fast = fast_layer(layer, make(layer, x))
    assert fast.engine.takes(x)
    assert_close(fast(x), layer(x))


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 1.0])
def test_chain_of_layers_with_relu_between(keep):
    net = sparse(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(60, 50),
            nn.ReLU(),
            nn.Linear(50, 40),
            nn.Linear(40, 7),
            nn.ReLU(),
        ),
        keep,
    )
    for batch in (1, 2, 63, 64, 65, 200):
        x = torch.randn(batch, 3, 4, 5)
        fast = same_as(FastSequential, net)
        fast.runs = [
            (0, 6, ChainEngine([net[1], net[3], net[4]], [True, False, True], x, flatten=True))
        ]
        assert fast.runs[0][2].takes(x)
        assert_close(fast(x), net(x))
        assert_close(fast(x.transpose(2, 3)), net(x.transpose(2, 3)))  # not contiguous


CONVS = [
    {"kernel_size": k, "stride": s, "padding": p, "dilation": d, "groups": g}
    for (k, s, p, d), g in itertools.product(
        [
            (1, 1, 0, 1),
            (3, 1, 1, 1),
            (5, 1, 0, 1),
            (3, 2, 1, 1),
            ((3, 2), (2, 3), (1, 2), (1, 2)),
            (3, 1, 2, 2),
            (3, 4, 0, 1),
            (3, 1, "same", 1),
        ],
        [1, 2, 4],
    )
] + [{"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "reflect"}]


@pytest.mark.parametrize("settings", CONVS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_convolution_with_every_setting(settings):
    layer = sparse(nn.Conv2d(4, 8, **settings), keep=0.4)
    for shape in ((3, 4, 13, 11), (4, 9, 9), (1, 4, 8, 60)):
        x = torch.randn(shape)
        fast = fast_layer(layer, ConvEngine([layer], x))
        assert fast.engine.takes(x)
        assert_close(fast(x), layer(x))


def test_large_planes_are_computed_in_pieces():
    layer, x = sparse(nn.Conv2d(2, 3, 3, padding=1), keep=0.5), torch.randn(2, 2, 70, 80)
    assert_close(fast_layer(layer, ConvEngine([layer], x))(x), layer(x))


def test_threads_give_the_same():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer, x = sparse(nn.Linear(800, 500)), torch.randn(300, 800)
        assert_close(fast_layer(layer, ChainEngine([layer], [False], x))(x), layer(x))
        layer, x = sparse(nn.Conv2d(16, 32, 3, padding=1), 0.3), torch.randn(7, 16, 30, 30)
        assert_close(fast_layer(layer, ConvEngine([layer], x))(x), layer(x))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bias", [True, False])
def test_dead_rows_and_columns_are_left_out(bias):
    layer = sparse(nn.Linear(20, 16, bias=bias), keep=1)
    layer.weight[::3] = 0
    layer.weight[:, ::2] = 0
    for x in (torch.randn(5, 20), torch.randn(20), torch.randn(2, 3, 20)):
        fast = fast_layer(layer, ShrunkEngine([layer], x))
        assert (
            ShrunkEngine.suits(layer)
            and fast.engine.takes(x)
            and fast.engine.weight.shape == (10, 10)
        )
        assert_close(fast(x), layer(x))
    conv = sparse(nn.Conv2d(6, 9, 3, stride=2, padding=1, bias=bias), keep=1)
    conv.weight[2:7] = 0
    conv.weight[:, 1] = 0
    x = torch.randn(3, 6, 10, 10)
    fast = fast_layer(conv, ShrunkEngine([conv], x))
    assert fast.engine.takes(x) and fast.engine.weight.shape[:2] == (4, 5)
    assert_close(fast(x), conv(x))
    assert not ShrunkEngine.suits(nn.Linear(4, 4)) and not ShrunkEngine.suits(
        nn.Conv2d(4, 4, 3, groups=4)
    )


def test_blocks():
    layer, x = sparse(nn.Linear(64, 48), keep=1), torch.randn(4, 64)
    layer.weight[:16] = 0
    layer.weight[:, 16:48] = 0
    assert (
        BsrEngine.suits(layer.weight)
        and not BsrEngine.suits(torch.randn(48, 60))
        and not BsrEngine.suits(torch.randn(48, 64))
    )
    assert_close(fast_layer(layer, BsrEngine([layer], x))(x), layer(x))


def test_what_an_engine_does_not_take_is_computed_densely():
    layer, x = sparse(nn.Linear(20, 6), keep=0.3), torch.randn(8, 20)
    fast = fast_layer(layer, ChainEngine([layer], [False], x))
    takes = fast.engine.takes
    assert takes(x) and takes(x[:4]) and takes(torch.randn(16, 20))
    assert not takes(x[:3]) and not takes(torch.randn(17, 20))  # not measured for these sizes
    assert not takes(x.double()) and not takes(x.to("meta")) and not takes(nn.Parameter(x))
    assert not takes(x.clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(x) and fast(x).dtype == torch.bfloat16
    y = x.clone().requires_grad_()
    fast(y).sum().backward()
    assert torch.allclose(y.grad, layer.weight.sum(0).expand(8, 20))
    fast.requires_grad_(True)
    assert not takes(x)
    fast(x).sum().backward()
    assert fast.weight.grad is not None
    with torch.no_grad():
        assert takes(x)
    fast.train()
    with torch.no_grad():
        assert not takes(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast.eval()(torch.randn(8, 19))


def test_images_that_do_not_fit_get_torchs_own_error():
    layer, x = sparse(nn.Conv2d(3, 4, 5)), torch.randn(2, 3, 8, 8)
    fast = fast_layer(layer, ConvEngine([layer], x))
    with pytest.raises(RuntimeError, match="channels"):
        fast(torch.randn(2, 4, 8, 6))
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        fast(torch.randn(2, 3, 4, 16))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_changed_weights_are_noticed(kind):
    layer = sparse(nn.Linear(20, 6) if kind == "linear" else nn.Conv2d(2, 6, 3), keep=0.3)
    x = torch.randn(8, 20) if kind == "linear" else torch.randn(8, 2, 5, 5)
    engine = ChainEngine([layer], [False], x) if kind == "linear" else ConvEngine([layer], x)
    fast = fast_layer(layer, engine)
    before = fast(x)
    with torch.no_grad():
        fast.weight.mul_(2)
        fast.bias.zero_()
    assert_close(fast(x), layer(x))
    assert not torch.allclose(fast(x), before)
    fast.weight = nn.Parameter(torch.ones_like(fast.weight), requires_grad=False)
    assert_close(fast(x), type(layer).__mro__[0].forward(same_as(type(layer), fast), x))
    twin = copy.deepcopy(fast)
    twin.weight.zero_()
    assert_close(twin(x), torch.zeros_like(before))
    assert fast.weight.all() and twin.engine is not fast.engine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning"
)  # forking with threads about is what is tested
def test_a_forked_process_has_its_own_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer, x = sparse(nn.Linear(800, 500)), torch.randn(300, 800)
        fast = fast_layer(layer, ChainEngine([layer], [False], x))
        answer = fast(x)
        pid = os.fork()
        if pid == 0:  # no assert here: the child must end without running pytest's own end
            signal.alarm(60)
            os._exit(0 if np.array_equal(fast.engine.run(x).numpy(), answer.numpy()) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)
