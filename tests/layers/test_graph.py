"""Tracing: the right branch, the right shapes, and nothing left behind."""

from __future__ import annotations

import math
import threading
from math import floor

import pytest
import torch
from torch import fx, nn
from torch.fx import _symbolic_trace

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


class Rounding(nn.Module):
    """Calls a function that torch.fx wraps in this very file."""

    def forward(self, x):
        return x + floor(1.5)


class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupt_leaves_modules_as_they_were(monkeypatch):
    def patchable():
        own = [vars(nn.Module)[name] for name in ("__call__", "__getattr__")]
        return [*own, *(f for f in vars(math).values() if callable(f)), floor]

    def stop(self):
        raise KeyboardInterrupt

    before = patchable()
    with pytest.raises(KeyboardInterrupt):
        trace(Interrupted())
    assert all(a is b for a, b in zip(patchable(), before, strict=True))
    # Ctrl-C while torch.fx removes its own patches.
    for kind in (_symbolic_trace._PatchedFnSetAttr, _symbolic_trace._PatchedFnSetItem):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "revert", stop)
            with pytest.raises(KeyboardInterrupt):
                trace(Rounding())
        assert all(a is b for a, b in zip(patchable(), before, strict=True))
    assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def test_traces_wait_for_each_other():
    inside, most = [], []

    class Slow(nn.Module):
        def forward(self, x):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()
            return x + 1

    failures = []

    def work():
        try:
            trace(Slow())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and most == [1, 1, 1, 1]


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
