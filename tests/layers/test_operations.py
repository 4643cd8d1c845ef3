"""The table of operations: every constant holds, and every spelling is the same function."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from lobs.certificate.lipschitz import _gain
from lobs.layers.operations import OPERATIONS, Kind, Step, step_of

ELEMENTWISE = [row for row in OPERATIONS if row.kind is Kind.ELEMENTWISE]
SETTINGS = {nn.LeakyReLU: [{}, {"negative_slope": -3.0}], nn.ELU: [{}, {"alpha": 2.0}]}
SETTINGS |= {nn.GELU: [{}, {"approximate": "tanh"}], nn.Hardtanh: [{}, {"max_val": 4.0}]}


def elementwise():
    for row in ELEMENTWISE:
        for module in row.modules:
            for settings in SETTINGS.get(module, [{}]):
                yield Step(row, module(**settings))
                yield from (Step(row, None, call, (), settings) for call in row.calls)


def spelled(step):
    call = step.call or type(step.module)
    return call if isinstance(call, str) else getattr(call, "__name__", "call")


def test_no_spelling_is_listed_twice():
    spellings = [s for row in OPERATIONS for s in (*row.modules, *row.calls)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.filterwarnings("ignore:nn.functional")
@pytest.mark.parametrize("step", list(elementwise()), ids=spelled)
def test_a_constant_is_the_steepest_slope(step):
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(step.apply(x * 1).sum(), x)
    steepest = float(slopes.abs().max())
    assert steepest <= _gain(step, x.shape) <= steepest * 1.01 + 1e-9


@pytest.mark.filterwarnings("ignore:nn.functional")
@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.modules[0].__name__)
def test_all_spellings_agree_and_work_on_each_element_alone(row):
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    expected = row.modules[0]()(x.clone())
    for call in row.calls:
        assert torch.equal(Step(row, None, call).apply(x.clone()), expected)
    alone = torch.stack([row.modules[0]()(v.clone()) for v in x.flatten()]).view_as(x)
    torch.testing.assert_close(expected, alone)


def random_steps():
    rows = {module: row for row in OPERATIONS for module in row.modules}
    for module in (
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.AvgPool2d(3, 1, 1),
        nn.AvgPool2d(2, divisor_override=1),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.BatchNorm2d(3).eval(),
        nn.Softmax(1),
        nn.Flatten(),
        nn.Unflatten(1, (3, 1)),
        nn.Dropout(0.3).eval(),
        nn.Identity(),
    ):
        yield Step(rows[type(module)], module)
    by_call = {call: row for row in OPERATIONS for call in row.calls}
    for call, args, kwargs in (
        (F.max_pool2d, (3,), {"stride": 1, "padding": 1}),
        (torch.max_pool2d, (2, 1), {}),
        (F.avg_pool2d, (2, 1), {}),
        (F.dropout, (0.5, False), {}),
        (operator.mul, (-3,), {}),
        (torch.mul, (), {"other": 0.5}),
        ("view", (2, -1), {}),
        ("softmax", (1,), {}),
        ("contiguous", (), {}),
    ):
        yield Step(by_call[call], None, call, args, kwargs)


@torch.no_grad()
@pytest.mark.parametrize("step", list(random_steps()), ids=spelled)
def test_no_step_stretches_a_difference_beyond_its_constant(step):
    shape = torch.Size((2, 3, 7, 6))
    gain = _gain(step, shape)
    for seed in range(20):
        torch.manual_seed(seed)
        x, change = torch.randn(shape), torch.randn(shape) * (torch.rand(shape) < 0.1)
        moved = float((step.apply(x + change) - step.apply(x)).norm())
        assert moved <= gain * float(change.norm()) * (1 + 1e-5) + 1e-6


def test_what_is_random_or_unknown_has_no_constant():
    by_call = {call: row for row in OPERATIONS for call in row.calls}
    graph = fx.Graph()
    other = graph.placeholder("other")
    for call, args, kwargs in (
        (F.dropout, (0.5,), {}),
        (F.dropout, (), {"p": 0.1, "training": True}),
        ("view", (torch.int32,), {}),
        (operator.mul, (other,), {}),
        (F.leaky_relu, (other,), {}),
        (F.max_pool2d, (other,), {}),
        (F.adaptive_max_pool2d, (other,), {}),
        (F.avg_pool2d, (other,), {}),
    ):
        step = Step(by_call[call], None, call, args, kwargs)
        assert _gain(step, torch.Size((1, 1, 4, 4))) is None, call
    assert step_of(graph.call_function(torch.erf, (other,)), None) is None
    assert step_of(graph.call_module("x", (other,)), nn.CELU()) is None


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "expected"),
    [
        (F.relu, (), {}, False),
        (F.relu, (True,), {}, True),
        (F.relu, (), {"inplace": True}, True),
        ("relu_", (), {}, True),
        (operator.iadd, (1,), {}, True),
        (operator.add, (1,), {}, False),
    ],
)
def test_a_call_that_overwrites_its_input_is_known(call, args, kwargs, expected):
    row = next(row for row in OPERATIONS if call in row.calls)
    assert Step(row, None, call, args, kwargs).in_place is expected
