"""Tracing: the right branch, the right shapes, and nothing left behind."""

from __future__ import annotations

import math
import sys
import threading
from math import floor

import pytest
import torch
from torch import fx, nn

from lobs.layers.graph import TraceError, argument_names, arguments, trace


class Masked(nn.Module):
    """Takes an optional argument, and looks whether it is there."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, mask=None, *, scale=2.0, **rest):
        h = self.fc(x) * scale
        if mask is not None:
            h = h * mask
        return h - rest["shift"] if "shift" in rest else h


def run(model, batch):
    """The traced network's answer to a batch."""
    graph = trace(model, names=argument_names(batch)).graph
    values = arguments(graph, batch, torch.device("cpu"))
    return fx.Interpreter(fx.GraphModule(model, graph)).run(
        initial_env=values, enable_io_processing=False
    )


@pytest.mark.parametrize("names", [("x",), ("x", "mask"), ("x", "mask", "scale"), ("x", "scale")])
def test_a_trace_takes_the_branch_that_the_call_takes(names):
    model = Masked()
    given = {"x": torch.randn(5, 4), "mask": torch.rand(5, 3), "scale": torch.tensor(3.0)}
    batch = {name: given[name] for name in names}
    assert torch.equal(run(model, batch), model(**batch))
    assert torch.equal(run(model, (given["x"], "a label")), model(given["x"]))


def test_arguments_that_cannot_be_followed_are_refused():
    class Listed(nn.Module):
        def forward(self, *xs):
            return xs[0]

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    x = torch.randn(2, 3)
    with pytest.raises(TraceError, match=r"\*args or \*\*kwargs"):
        trace(Listed(), x)
    with pytest.raises(TraceError, match=r"\*args or \*\*kwargs"):
        trace(Masked(), {"x": torch.randn(5, 4), "shift": 1.0})
    with pytest.raises(TraceError, match="argument 'y' is missing"):
        trace(Two(), x)


def test_shapes_are_those_of_the_run():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(2, 3, 3), nn.Flatten())
    x = -torch.ones(5, 2, 6, 6)
    shapes = trace(model, x).shapes
    assert [tuple(s) for n, s in shapes.items() if n.op != "output"] == [
        (5, 2, 6, 6),
        (5, 2, 6, 6),
        (5, 3, 4, 4),
        (5, 48),
    ]
    assert bool((x == -1).all())  # the example is the caller's


def test_a_layer_of_ones_own_class_is_one_step_only_if_it_computes_as_the_known_class():
    class Renamed(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def modules(layer):
        nodes = trace(nn.Sequential(layer, nn.ReLU())).graph.nodes
        return [str(n.target) for n in nodes if n.op == "call_module"]

    assert modules(Renamed(3, 3)) == ["0", "1"]
    assert modules(Doubled(3, 3)) == ["1"]


def patchable():
    own = [vars(nn.Module)[name] for name in ("__call__", "__getattr__")]
    true_math = vars(sys.modules["math"])  # in traced code the name stands for another one
    here = vars(sys.modules[__name__])["floor"]
    return [*own, *(f for f in true_math.values() if callable(f)), here]


def test_tracing_patches_nothing_so_that_an_interrupt_leaves_nothing_behind():
    before, during = patchable(), []

    class Interrupted(nn.Module):
        def forward(self, x):
            during.extend(patchable())
            floor(x.size(0) / 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace(Interrupted())
    for now in (during, patchable()):
        assert all(a is b for a, b in zip(now, before, strict=True))
    assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def scaled(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))


@fx.wrap
def unfollowable(x):
    return x if x.sum() > 0 else -x


class Attending(nn.Module):
    """Takes roots of traced sizes, directly and in a function of its file, and of a parameter."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return unfollowable(self.scores(self.fc(x)) * self.scale) / math.sqrt(x.size(1))

    def scores(self, q):
        return scaled(q, q) + floor(q.size(0) / 2)


def test_functions_of_math_and_wrapped_ones_are_steps():
    model, x = Attending(), torch.randn(2, 3, 4)
    assert torch.equal(run(model, x), model(x))
    names = {getattr(n.target, "__name__", n.target) for n in trace(model).graph.nodes}
    assert {"sqrt", "floor", "unfollowable", "fc", "scale"} <= names


def test_hooks_and_another_forward_on_the_network_itself_are_refused():
    hooked, patched = Masked(), Masked()
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    patched.forward = lambda x: x
    for model in (hooked, patched):
        with pytest.raises(TraceError, match="hooks or another forward"):
            trace(model, torch.randn(5, 4))


def test_other_threads_run_and_trace_while_a_network_is_traced():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            begun.set()
            assert go_on.wait(20)
            return x + math.sqrt(x.size(0))

    results = []
    thread = threading.Thread(target=lambda: results.append(trace(Slow())))
    thread.start()
    assert begun.wait(20)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    same = run(model, x), model(x)
    untouched = vars(nn.Module)["__call__"], vars(nn.Module)["__getattr__"], math.sqrt(4.0)
    go_on.set()
    thread.join()
    assert torch.equal(*same) and len(results) == 1
    assert untouched == (nn.Module.__call__, nn.Module.__getattr__, 2.0)


def test_attributes_and_buffers_assigned_in_forward_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = x.sum()
            return x + torch.tensor([1.0, 2.0])

    model = Counting()
    before = dict(vars(model)), model.seen
    assert trace(model, torch.ones(3, 2)).assigns_state
    assert (vars(model).keys(), model.seen) == (before[0].keys(), before[1])
    assert not trace(nn.Sequential(nn.Linear(2, 2))).assigns_state


def test_only_one_file_traces():
    from pathlib import Path

    import lobs

    root = Path(lobs.__file__).parent
    tracing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("symbolic_trace", "fx.Tracer"))
    }
    assert tracing == {"layers/graph.py"}
